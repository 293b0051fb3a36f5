"""How many KV blocks fit: device limits, what the process already uses, and what a block costs."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from enginebay.errors import MemoryBudgetError

#: On CPU the cache shares the host with everything else, so it takes this part of what is free.
CPU_SHARE = 0.25


def host_memory_bytes() -> int:
    """Memory that this process may still take: what the kernel calls available, within the cgroup's limit."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return max(available, 0)


def cuda_kv_bytes(device: torch.device, utilization: float, peak_bytes: int, workspace_bytes: int) -> int:
    """Bytes for the KV cache on a CUDA device.

    Parameters
    ----------
    utilization
        Share of the device's memory that the engine may use in all.
    peak_bytes
        Peak of torch's allocator while the largest step ran, weights included.
    workspace_bytes
        What the attention backends take beyond that.
    """
    free, total = torch.cuda.mem_get_info(device)
    outside_torch = total - free - torch.cuda.memory_reserved(device)
    return int(total * utilization) - outside_torch - peak_bytes - workspace_bytes


def num_kv_blocks(available_bytes: int, block_bytes: int, max_model_len: int, block_size: int, wanted: int) -> int:
    """Blocks to allocate, the null block included.

    Parameters
    ----------
    available_bytes
        For the whole pool.
    block_bytes
        Of one block over all layers.
    wanted
        Blocks beyond which none could be used.

    Raises
    ------
    MemoryBudgetError
        Not even one block fits.
    """
    blocks = min(available_bytes // block_bytes, wanted + 1)
    if blocks < 2:
        raise MemoryBudgetError(
            f"the KV cache has {max(available_bytes, 0)} bytes, but needs {2 * block_bytes} for its first block of "
            f"{block_size} tokens; raise cache.memory_bytes where it is set, else free memory: lower "
            f"scheduler.max_num_batched_tokens or, on cuda, raise cache.gpu_memory_utilization "
            f"(max_model_len {max_model_len} takes {-(-max_model_len // block_size) * block_bytes})"
        )
    return blocks
