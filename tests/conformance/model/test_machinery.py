"""The parts that the model laws are made of."""

from __future__ import annotations

import pytest
import torch
from enginebay.conformance.model.operators import own_operators
from enginebay.conformance.model.ranks import on_ranks
from enginebay.kernels.norm import rms_norm
from enginebay.layers.parallel import Communicator
from torch import Tensor


def test_collectives_are_over_all_ranks() -> None:
    def work(rank: int, comm: Communicator) -> Tensor:
        own = torch.full((2, 1), float(rank + 1))
        return torch.cat([comm.all_reduce(own), comm.all_gather(own).sum(-1, keepdim=True), own], -1)

    for rank, found in enumerate(on_ranks(3, work)):
        assert found.tolist() == [[6.0, 6.0, rank + 1.0]] * 2


def test_the_rank_that_failed_is_heard_and_not_those_that_waited() -> None:
    def work(rank: int, comm: Communicator) -> Tensor:
        if rank == 2:
            raise ValueError("rank 2 is wrong")
        return comm.all_reduce(torch.ones(1))

    with pytest.raises(ValueError, match="rank 2 is wrong"):
        on_ranks(3, work)


def test_operators_are_told_apart_by_who_runs_them() -> None:
    x, weight = torch.ones(2, 8), torch.ones(8)
    with own_operators() as found:
        rms_norm(x.view(2, 8), weight, 1e-6)
    assert found == set()
    with own_operators() as found:
        x * 2
    assert found == {f"aten::mul (in {__name__})"}
