"""How many KV blocks fit: device limits, what the process already uses, and what a block costs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from enginebay.errors import MemoryBudgetError

#: On CPU the cache shares the host with everything else, so it takes this part of what is free.
CPU_SHARE = 0.25
#: torch's allocator takes memory from the driver in multiples of this.
ALLOCATION_UNIT = 2 * 2**20
#: What may be taken outside torch between measuring and allocating: drivers and displays move by as much on their own.
RACE_SLACK = 128 * 2**20
#: What an operator can do on a device that is too small, as an error's last words.
FREE_MEMORY = (
    "lower scheduler.max_num_batched_tokens or scheduler.max_num_seqs, capture fewer graphs.decode_sizes, or end other "
    "processes on the device"
)


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


@dataclass(frozen=True)
class DeviceMemory:
    """A CUDA device's memory at one moment, in bytes."""

    free: int
    total: int
    #: what torch's allocator took from the driver, and the part of it that lives in tensors
    reserved: int
    allocated: int

    @classmethod
    def read(cls, device: torch.device) -> DeviceMemory:
        """The figures as they stand."""
        free, total = torch.cuda.mem_get_info(device)
        return cls(free, total, torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device))

    @classmethod
    def settled(cls, device: torch.device) -> DeviceMemory:
        """The figures once the device is idle and the allocator has given back what no tensor uses."""
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return cls.read(device)

    @property
    def used(self) -> int:
        """By whomever."""
        return self.total - self.free

    @property
    def outside(self) -> int:
        """Held by other processes, by the CUDA context, and by libraries that ask the driver themselves."""
        return self.used - self.reserved


@dataclass(frozen=True, kw_only=True)
class KVBudget:
    """What a CUDA device's memory is spent on, in bytes; the KV pool gets what is left."""

    total: int
    #: share of `total` that may be used in all
    utilization: float
    #: outside torch, see `DeviceMemory.outside`
    outside: int
    weights: int
    #: what torch's allocator held beyond weights at the peak of the largest steps, buffers of batch and backends included
    steps: int
    #: what attention backends declare and had not allocated when the steps ran
    workspaces: int
    #: what CUDA graphs keep
    graphs: int
    #: the allocator's rounding of the pool's tensors
    rounding: int

    @property
    def limit(self) -> int:
        """Bytes that may be used in all."""
        return int(self.total * self.utilization)

    @property
    def pool(self) -> int:
        """Bytes for the pool; negative where the rest alone is too much."""
        spent = self.outside + self.weights + self.steps + self.workspaces + self.graphs + self.rounding
        return self.limit - spent

    def __str__(self) -> str:
        return (
            f"{self.limit} bytes (cache.gpu_memory_utilization {self.utilization} of {self.total}) less {self.weights} of "
            f"weights, {self.steps} at the peak of the largest steps, {self.workspaces} of further attention workspaces, "
            f"{self.graphs} of CUDA graphs, {self.rounding} of rounding, and {self.outside} held outside torch (other "
            f"processes, the CUDA context, libraries) leave {self.pool}"
        )

    def require(self, least: int) -> int:
        """The pool's bytes.

        Raises
        ------
        MemoryBudgetError
            They are fewer than `least`.
        """
        if self.pool < least:
            raise MemoryBudgetError(
                f"the KV cache needs {least} bytes for its first block, but {self}. Raise cache.gpu_memory_utilization by "
                f"{(least - self.pool) / self.total:.3f} at least, {FREE_MEMORY}"
            )
        return self.pool

    def check_others(self, now: DeviceMemory) -> None:
        """Refuse to allocate where others took memory since the budget was measured.

        Raises
        ------
        MemoryBudgetError
            What is held outside torch grew by more than `RACE_SLACK`.
        """
        grown = now.outside - self.outside
        if grown > RACE_SLACK:
            raise MemoryBudgetError(
                f"while the KV cache was being sized another process took {grown} bytes of the device: {self.outside} were "
                f"held outside torch, now {now.outside} are, and {now.free} of {now.total} are free. Start one engine at a "
                "time on a device, or set cache.memory_bytes in each"
            )


@contextmanager
def out_of_memory_explained(device: torch.device, what: Callable[[], str], advice: str) -> Iterator[None]:
    """Turn the allocator's error into one with the device's numbers.

    Parameters
    ----------
    what
        Says what did not fit; asked only then.
    advice
        What the operator can do.

    Raises
    ------
    MemoryBudgetError
        The device had too little memory.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        memory = DeviceMemory.read(device)
        raise MemoryBudgetError(
            f"{what()} did not fit {device}: of its {memory.total} bytes torch held {memory.reserved}, others (processes, "
            f"the CUDA context, libraries) {memory.outside}, and {memory.free} were free; {advice} ({error})"
        ) from error


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
