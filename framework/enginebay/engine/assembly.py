"""Assembly: from an explanation to a running engine. What was chosen, and why, is `enginebay.engine.explanation`'s."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from enginebay.config import LoadedConfig, ResolvedConfig, validate_options
from enginebay.engine.core import EngineCore, EngineInfo
from enginebay.engine.explanation import Explanation, attention_backends, explain, processor_part
from enginebay.engine.kv_pool import fit_length, pool_blocks
from enginebay.interfaces.executor import Executor, ExecutorContext
from enginebay.interfaces.scheduler import Scheduler, SchedulerContext, SchedulingPolicy
from enginebay.kv_cache.coordinator import KVCacheCoordinator
from enginebay.loading.hf_config import eos_token_ids
from enginebay.loading.tokenizer import load_tokenizer
from enginebay.models.reference import resolve_tokenizer
from enginebay.plugins.making import make
from enginebay.plugins.records import SchedulerRecord
from enginebay.plugins.selection import identities
from enginebay.scheduling.scheduler import TokenBudgetScheduler
from enginebay.worker.worker import DeviceWorker, WorkerSpec


def build_engine(loaded: LoadedConfig) -> tuple[EngineCore, Any]:
    """Resolve, load and start. Returns the core and the tokenizer (None for a folder without one and random weights)."""
    return start_engine(explain(loaded))


def start_engine(explanation: Explanation) -> tuple[EngineCore, Any]:
    """Load and start what `explain` chose; the second half of `build_engine`, for whoever times or shows the halves."""
    tokenizer = _load_tokenizer(explanation)
    executor = _start_executor(explanation, _vocab_limit(explanation, tokenizer))
    try:
        return _start_core(explanation, executor, tokenizer), tokenizer
    except BaseException:
        executor.shutdown()
        raise


def _load_tokenizer(explanation: Explanation) -> Any:
    config = explanation.config
    if config.tokenizer is not None:
        return load_tokenizer(resolve_tokenizer(config.tokenizer))
    folder = explanation.files.path
    has_one = explanation.files.kind == "gguf" or any(Path(folder).glob("tokenizer*"))
    if explanation.parts.dummy_seed is not None and not has_one:
        return None
    return load_tokenizer(explanation.files)


def _vocab_limit(explanation: Explanation, tokenizer: Any) -> int:
    """The ids that may be drawn: those behind the tokenizer's last only pad the model's vocabulary (C39)."""
    size = int(explanation.parts.hf_config.vocab_size)
    return size if tokenizer is None else min(size, max(tokenizer.get_vocab().values(), default=size - 1) + 1)


def _start_executor(explanation: Explanation, vocab_limit: int) -> Executor:
    config, loaded = explanation.config, explanation.loaded
    record = explanation.executor.chosen
    assert record is not None
    spec = WorkerSpec(
        config=config,
        resolved=explanation.resolved,
        parts=explanation.parts,
        cache=explanation.cache,
        attention=attention_backends(explanation),
        processors=tuple(processor_part(explanation, selection) for selection in explanation.processors),
        vocab_limit=vocab_limit,
    )
    executor = make(
        explanation.executor,
        ExecutorContext(
            make_worker=partial(DeviceWorker, spec),
            world_size=config.parallel.world_size,
            device=explanation.resolved.device,
            max_concurrent_batches=explanation.max_concurrent_batches,
            options=validate_options(record.options, config.executor.options, "executor.options", loaded.where),
        ),
        Executor,  # type: ignore[type-abstract]
    )
    try:
        executor.start()
    except BaseException:
        executor.shutdown()
        raise
    return executor


def _start_core(explanation: Explanation, executor: Executor, tokenizer: Any) -> EngineCore:
    config = explanation.config
    num_blocks, pool_why = pool_blocks(explanation, executor)
    resolved = explanation.resolved
    resolved = replace(resolved, num_kv_blocks=num_blocks, why={**resolved.why, **pool_why})
    depth = min(explanation.max_concurrent_batches, executor.max_concurrent_batches)
    kv = KVCacheCoordinator(
        windows=[group.spec.window for group in explanation.cache.groups],
        block_size=resolved.block_size,
        num_blocks=num_blocks,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=resolved.max_model_len,
        prefix_caching=config.cache.prefix_caching,
        max_tokens_in_flight=resolved.max_num_batched_tokens * depth,
    )
    if not kv.fits(resolved.max_model_len):
        resolved = fit_length(explanation, resolved, kv)
    executor.initialize_kv_cache(num_blocks)
    info = EngineInfo(
        config=config,
        sources=explanation.loaded.sources,
        resolved=resolved,
        selections=explanation.selections,
        vocab_size=explanation.parts.hf_config.vocab_size,
        eos_token_ids=eos_token_ids(explanation.files, explanation.parts.hf_config, tokenizer),
    )
    observers = explanation.loader.observers(identities(explanation.selections))
    return EngineCore(info, executor, _scheduler(explanation, resolved, kv, depth), kv, depth, observers)


def _scheduler(explanation: Explanation, resolved: ResolvedConfig, kv: KVCacheCoordinator, depth: int) -> Scheduler:
    config = explanation.config.scheduler
    record = explanation.scheduler.chosen
    assert isinstance(record, SchedulerRecord)
    context = SchedulerContext(
        kv=kv,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_model_len=resolved.max_model_len,
        chunked_prefill=config.chunked_prefill,
        max_prefill_tokens=None if config.max_prefill_tokens == "auto" else config.max_prefill_tokens,
        max_concurrent_batches=depth,
        policy=None,
        options=validate_options(record.options, config.options, "scheduler.options", explanation.loaded.where),
    )
    if record.depth == "scheduler":
        return make(explanation.scheduler, context, Scheduler)  # type: ignore[type-abstract]
    policy = make(explanation.scheduler, context, SchedulingPolicy)  # type: ignore[type-abstract]
    return TokenBudgetScheduler(replace(context, policy=policy))
