"""How many blocks the KV pool gets, and how long a request may be in it."""

from __future__ import annotations

from dataclasses import replace

from enginebay.config import ResolvedConfig
from enginebay.engine.explanation import Explanation
from enginebay.errors import MemoryBudgetError
from enginebay.interfaces.batch import torch_dtype
from enginebay.interfaces.executor import Executor
from enginebay.kv_cache.coordinator import KVCacheCoordinator
from enginebay.plugins.requirements import FP8
from enginebay.worker.memory import num_kv_blocks


def fit_length(explanation: Explanation, resolved: ResolvedConfig, kv: KVCacheCoordinator) -> ResolvedConfig:
    """Shorten max_model_len to what the pool holds; a length that was written is never shortened.

    Where the number of blocks was written as well, both are the operator's: longer requests are refused one by one (C21).
    """
    config, longest = explanation.config, kv.longest
    if config.max_model_len != "auto":
        if config.cache.num_blocks == "auto":
            raise MemoryBudgetError(_too_long(explanation, kv))
        return resolved
    if longest == 0:
        groups = len(explanation.cache.groups)
        raise MemoryBudgetError(
            f"the KV pool has {kv.num_blocks} block(s), but a request needs one in each of the model's {groups} cache "
            "groups; raise cache.num_blocks, cache.memory_bytes or cache.gpu_memory_utilization"
        )
    # One truth for admission and the listing (C7): what a single request can really hold.
    why = {**resolved.why, "max_model_len": "tokens that the whole KV pool holds"}
    return replace(resolved, max_model_len=longest, why=why)


def _too_long(explanation: Explanation, kv: KVCacheCoordinator) -> str:
    """Why a request of max_model_len fits no empty pool, and each thing that would help."""
    config, resolved, cache = explanation.config, explanation.resolved, explanation.cache
    itemsize = torch_dtype(resolved.kv_dtype).itemsize
    block_bytes = cache.block_bytes(itemsize)
    needed = sum(m.needed_on(resolved.max_model_len, 0, 0) for m in kv.managers)
    ways = [f"max_model_len at most {kv.longest} (auto fits it)"] if kv.longest else []
    if config.cache.memory_bytes != "auto":
        ways.append(f"cache.memory_bytes {(needed + 1) * block_bytes} or more")
    elif resolved.device == "cuda":
        ways.append(f"a cache.gpu_memory_utilization above {config.cache.gpu_memory_utilization}")
        ways.append(f"a scheduler.max_num_batched_tokens below {resolved.max_num_batched_tokens}")
    else:
        ways.append(f"cache.memory_bytes {(needed + 1) * block_bytes}, if the host has them")
    if itemsize > 1 and all(FP8 in record.kv_dtypes for record in explanation.attention.records.values()):
        ways.append("cache.dtype fp8")
    return (
        f"max_model_len ({explanation.loaded.where('max_model_len')}): a request of {resolved.max_model_len} tokens takes "
        f"{needed} KV blocks of {block_bytes} bytes, {needed * block_bytes} in all, but the pool has {kv.num_blocks}, "
        f"{kv.num_blocks * block_bytes} bytes, and holds one of {kv.longest} tokens. What would work: {'; '.join(ways)}"
    )


def pool_blocks(explanation: Explanation, executor: Executor) -> tuple[int, dict[str, str]]:
    """Blocks of the pool, the null block included, and why there are so many where nobody wrote it."""
    config, resolved, cache = explanation.config, explanation.resolved, executor.kv_cache_spec()
    block_bytes = cache.block_bytes(torch_dtype(resolved.kv_dtype).itemsize)
    if config.cache.num_blocks != "auto":
        num_blocks, memory = config.cache.num_blocks + 1, explanation.hardware.memory_bytes
        # said here: the pool's books are in host memory, and made before the cache
        if memory and num_blocks * block_bytes > memory:
            raise MemoryBudgetError(
                f"cache.num_blocks ({explanation.loaded.where('cache.num_blocks')}): {num_blocks} blocks of {block_bytes} "
                f"bytes are {num_blocks * block_bytes}, and {resolved.device} has {memory}; at most "
                f"{memory // block_bytes - 1} fit beside nothing else, and auto finds how many do"
            )
        return num_blocks, {}
    per_request = -(-resolved.max_model_len // resolved.block_size) * len(cache.groups)
    wanted = per_request * config.scheduler.max_num_seqs
    available = executor.available_kv_memory()
    num_blocks = num_kv_blocks(
        available,
        block_bytes,
        resolved.max_model_len,
        resolved.block_size,
        wanted=wanted,
    )
    budgets = [budget for budget in executor.collective_rpc("kv_budget") if budget is not None]
    measured = str(min(budgets, key=lambda b: b.pool)) if budgets else f"{available} bytes for the pool"
    enough = f"; {config.scheduler.max_num_seqs} requests of max_model_len take no more" if num_blocks > wanted else ""
    return num_blocks, {"num_kv_blocks": measured + enough}
