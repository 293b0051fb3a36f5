"""What layers know of other ranks: their own number, and two collectives. It knows no process group.

A rank's share of a size is computed here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from enginebay.errors import ModelError
from enginebay.interfaces.quant import Shard


class Communicator(Protocol):
    """Collectives over the tensor-parallel group, called by every rank in the same order."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks; may work in place."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors (equal in shape) one after another along the last axis."""


class SingleRank:
    """The group of one."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor


@dataclass(frozen=True)
class TensorParallel:
    """This rank's place in its tensor-parallel group."""

    rank: int = 0
    world: int = 1
    comm: Communicator = field(default_factory=SingleRank)

    def shard(self, size: int, what: str) -> Shard:
        """This rank's equal share of `size`.

        Raises
        ------
        ModelError
            The size does not divide; `what` names it.
        """
        if size % self.world:
            raise ModelError(f"{what} is {size}, which parallel.tensor {self.world} does not divide")
        share = size // self.world
        return Shard(self.rank * share, (self.rank + 1) * share, size)

    def kv_heads(self, num_kv_heads: int) -> tuple[int, int]:
        """First KV head and number of KV heads of this rank; ranks share a head where there are more ranks than heads.

        Raises
        ------
        ModelError
            Neither number divides the other.
        """
        if num_kv_heads >= self.world and num_kv_heads % self.world == 0:
            share = num_kv_heads // self.world
            return self.rank * share, share
        if num_kv_heads < self.world and self.world % num_kv_heads == 0:
            return self.rank * num_kv_heads // self.world, 1
        raise ModelError(f"{num_kv_heads} KV heads cannot be shared by parallel.tensor {self.world}: neither divides")
