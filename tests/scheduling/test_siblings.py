"""Siblings: held until their leader's prompt is computed, or it has ended."""

from __future__ import annotations

import numpy as np
from enginebay.interfaces.scheduler import Request
from enginebay.sampling.params import SamplingParams
from enginebay.scheduling.siblings import Siblings


def request(name: str, leader: Request | None = None) -> Request:
    return Request(name, np.arange(5, dtype=np.int32), SamplingParams(), frozenset(), 10, seed=0, leader=leader)


def test_a_sibling_is_held_only_while_its_leader_has_produced_nothing() -> None:
    siblings, leader = Siblings(), request("leader")
    first, second, late = (request(name, leader) for name in ("first", "second", "late"))
    assert siblings.hold(first, {"leader"})
    assert siblings.hold(second, {"leader"})
    assert len(siblings) == 2
    assert siblings.release(leader) == [first, second]
    assert siblings.release(leader) == []
    leader.output_token_ids.append(1)
    assert not siblings.hold(late, {"leader"})
    assert len(siblings) == 0


def test_nobody_waits_for_a_leader_that_is_gone_or_never_was() -> None:
    siblings, leader = Siblings(), request("leader")
    assert not siblings.hold(request("orphan", leader), {"another"})
    assert not siblings.hold(request("alone"), {"alone"})


def test_a_held_request_that_ends_is_forgotten() -> None:
    siblings, leader = Siblings(), request("leader")
    first, second = request("first", leader), request("second", leader)
    siblings.hold(first, {"leader"})
    siblings.hold(second, {"leader"})
    siblings.discard(first)
    siblings.discard(first)
    siblings.discard(leader)
    assert siblings.release(leader) == [second]
