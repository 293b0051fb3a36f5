"""A tensor-parallel group on one machine: threads stand for ranks. It knows collectives, and no model."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from enginebay.layers.parallel import Communicator

#: a rank that waits this long for another, in seconds, has lost it
TIMEOUT = 30.0


class ThreadComm:
    """The collectives of one rank: each puts its tensor down, waits for the others, and takes all."""

    def __init__(self, rank: int, parts: list[Tensor | None], barrier: threading.Barrier) -> None:
        self._rank, self._parts, self._barrier = rank, parts, barrier

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See `Communicator.all_reduce`."""
        return torch.stack(self._all(tensor)).sum(0)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """See `Communicator.all_gather`."""
        return torch.cat(self._all(tensor), -1)

    def _all(self, tensor: Tensor) -> list[Tensor]:
        self._parts[self._rank] = tensor.clone()
        self._barrier.wait()
        parts = [part for part in self._parts if part is not None]
        self._barrier.wait()
        return parts


def on_ranks(world: int, work: Callable[[int, Communicator], Tensor]) -> list[Tensor]:
    """What `work(rank, comm)` gives on each of `world` ranks; the first error of any is raised."""
    parts: list[Tensor | None] = [None] * world
    barrier = threading.Barrier(world, timeout=TIMEOUT)
    found: dict[int, Tensor] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank, ThreadComm(rank, parts, barrier))
        except BaseException as error:  # a law's failure is the test's, whatever it is
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        # those that waited for a rank that failed say only that
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return [found[rank] for rank in range(world)]
