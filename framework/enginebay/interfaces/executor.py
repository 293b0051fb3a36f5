"""The executor bay: where workers live, and how a step reaches them.

An executor knows processes and devices; it does not know models, caches or requests. It makes workers through
`ExecutorContext.make_worker`, passes every call to all of them, and returns the driver's answer.

What a worker raises reaches the caller with its type and message, and with a note that names the rank (``rank 0``); where the
worker lives in another process, a note holds its traceback too. An exception that cannot be sent from there arrives as an
`ExecutorError` that quotes it. A step that fails ends its own futures and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel

from enginebay.interfaces.scheduler import ModelOutput, SchedulerOutput
from enginebay.plugins.records import KVLayout
from enginebay.plugins.requirements import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers that share a block table: equal in cache spec, dtype and layout."""

    spec: AttentionSpec
    #: indices of the attention layers in order
    layers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """What the model's layers ask of the cache: its groups, and what a block costs."""

    groups: tuple[CacheGroup, ...]
    #: tokens a block
    block_size: int
    kv_dtype: str
    layout: KVLayout

    @property
    def num_tensors(self) -> int:
        """Cache tensors: the j-th layer of every group shares tensor j, since block ids are unique over groups."""
        return max((len(g.layers) for g in self.groups), default=0)

    def block_bytes(self, itemsize: int) -> int:
        """Bytes of one block over all cache tensors."""
        return sum(
            max(
                2 * self.block_size * g.spec.num_kv_heads * g.spec.head_dim * itemsize
                for g in self.groups
                if len(g.layers) > j
            )
            for j in range(self.num_tensors)
        )


class Worker(Protocol):
    """One rank's model on one device. Implemented by `enginebay.worker`."""

    def start(self) -> None:
        """Open the device, build the model and load its weights."""

    def kv_cache_spec(self) -> KVCacheSpec:
        """What this rank's layers ask of the cache."""

    def available_kv_memory(self) -> int:
        """Bytes left for the KV cache, measured by a rehearsal of the largest steps and of graph captures."""

    def kv_budget(self) -> Any:
        """How the pool's size came about, printable; None where it was not measured."""

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocate `num_blocks` blocks (the null block included), and capture graphs."""

    def execute_model(self, output: SchedulerOutput) -> None:
        """Run a step as far as its logits."""

    def sample(self) -> Future[ModelOutput]:
        """Sample the step that `execute_model` ran last; the future completes when the ids are on the host."""

    def shutdown(self) -> None:
        """Free the device."""


@dataclass(frozen=True, kw_only=True)
class ExecutorContext:
    """What an executor's factory is given."""

    #: builds the worker of a rank; called in the process that the worker lives in, so it can be pickled
    make_worker: Callable[[int], Worker]
    world_size: int
    #: device type
    device: str
    #: 1 when asynchronous scheduling is off
    max_concurrent_batches: int
    options: BaseModel


class Executor(ABC):
    """Runs steps on workers. Calls return at once with futures that complete in order."""

    def __init__(self, context: ExecutorContext) -> None:
        self.context = context

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that may be in flight."""
        return self.context.max_concurrent_batches

    @abstractmethod
    def start(self) -> None:
        """Make the workers and load the model. Raises what a worker raised; then `shutdown` still has to be called."""

    @abstractmethod
    def kv_cache_spec(self) -> KVCacheSpec:
        """The cache spec that all workers agree on. Raises `ExecutorError` where they do not."""

    @abstractmethod
    def available_kv_memory(self) -> int:
        """The least bytes that any worker has left for the KV cache."""

    @abstractmethod
    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocate the cache on every worker."""

    @abstractmethod
    def execute_model(self, output: SchedulerOutput) -> Future[None]:
        """Start a step on every worker; the future ends at logits, or with the worker's exception."""

    @abstractmethod
    def sample(self) -> Future[ModelOutput]:
        """Sample the step started last; the future completes when its ids are on the host."""

    @abstractmethod
    def collective_rpc(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a worker method by name on every rank, after the steps in flight, and return all answers by rank.

        Parameters
        ----------
        method
            A public method of the worker.
        args
            Its arguments.
        timeout_s
            Most seconds to wait for the answers; the workers finish the call regardless. None: as long as it takes.

        Raises
        ------
        ExecutorError
            There is no such method; or not every rank answered in time; or this executor cannot bound a call.
        """

    @abstractmethod
    def check_health(self) -> None:
        """Raise `ExecutorError` if a worker is gone."""

    def on_failure(self, callback: Callable[[BaseException], None]) -> None:  # noqa: B027 - optional
        """Have `callback` told once, of an `ExecutorError`, when a worker's process dies on its own; from any thread."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers; may be called twice, also after a failed start. Futures given out are done when it returns.

        Nothing is left of it: no thread, process, open file or socket, and no shared memory.
        """
