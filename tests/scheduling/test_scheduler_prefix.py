"""The scheduler with a prefix cache: hits, publication at retirement, siblings, the prefill cap. The device is conftest's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from enginebay.errors import RequestError
from enginebay_priority.policy import UrgentFirst

if TYPE_CHECKING:
    from tests.scheduling.conftest import Simulator


def test_a_second_request_starts_behind_the_common_prefix(simulator: type[Simulator]) -> None:
    sim = simulator(prefix_caching=True)
    sim.add(range(12), outputs=2)
    sim.run()
    second = sim.add([*range(10), 12, 12], outputs=2)
    output = sim.step()
    assert output is not None
    assert (output.num_computed_tokens.tolist(), output.num_scheduled_tokens.tolist()) == ([8], [4])
    assert output.new_requests[0].num_computed_tokens == second.num_cached_tokens == 8
    sim.retire()
    sim.run()
    sim.check_idle()
    assert sim.scheduler.stats().num_prefix_hits == 8


def test_c30_a_prompt_of_whole_blocks_twice_computes_at_least_one_token(simulator: type[Simulator]) -> None:
    sim = simulator(prefix_caching=True)
    for _ in range(3):
        sim.add(range(8), outputs=3)
        sim.run()
    sim.check_idle()
    assert [got.request.num_cached_tokens for got in sim.received.values()] == [0, 4, 4]


@pytest.mark.parametrize("concurrent", [1, 2])
def test_nothing_is_found_before_its_step_has_retired(simulator: type[Simulator], concurrent: int) -> None:
    sim = simulator(prefix_caching=True, concurrent=concurrent)
    sim.add(range(12), outputs=2)
    sim.step()
    early = sim.add(range(12), outputs=2)
    if concurrent == 2:
        sim.step()
        assert early.num_cached_tokens == 0
    sim.retire()
    late = sim.add(range(12), outputs=2)
    sim.run()
    assert late.num_cached_tokens == 8
    sim.check_idle()


def test_c31_a_salt_keeps_requests_apart(simulator: type[Simulator]) -> None:
    sim = simulator(prefix_caching=True)
    cached = []
    for salt in ("", "x", "x", ""):
        cached.append(sim.add(range(12), outputs=2, salt=salt))
        sim.run()
    assert [request.num_cached_tokens for request in cached] == [0, 0, 8, 8]
    sim.check_idle()


def test_off_means_off(simulator: type[Simulator]) -> None:
    sim = simulator(prefix_caching=False)
    requests = []
    for _ in range(2):
        requests.append(sim.add(range(12), outputs=2))
        sim.run()
    assert [request.num_cached_tokens for request in requests] == [0, 0]


def test_a_preempted_request_finds_its_own_blocks_again(simulator: type[Simulator]) -> None:
    """C23: recomputing is mostly looking up, while nobody took the blocks."""
    sim = simulator(prefix_caching=True, max_num_seqs=1, policy=UrgentFirst())
    low = sim.add(range(10), outputs=12, priority=5)
    sim.run(steps=6)
    sim.add([7] * 5, outputs=2, priority=0)
    resumed = []
    while sim.scheduler.has_unfinished():
        output = sim.step()
        assert output is not None
        resumed += [n.num_computed_tokens for n in output.new_requests if n.request_id == low.request_id]
        sim.retire()
    assert low.num_preemptions == 1
    assert resumed == [12], "whole blocks of prompt and outputs"
    assert low.num_cached_tokens == 0, "what it found at its first seat"
    sim.check_idle()


@pytest.mark.parametrize("concurrent", [1, 2, 3])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_siblings_wait_for_their_leader_and_share_its_blocks(
    simulator: type[Simulator], prefix_caching: bool, concurrent: int
) -> None:
    sim = simulator(prefix_caching=prefix_caching, concurrent=concurrent)
    salt = "" if prefix_caching else "family"
    leader = sim.add(range(10), outputs=6, salt=salt)
    if not prefix_caching:
        leader.cache_extras = (("family", "1"),)
    others = [sim.add(range(10), outputs=6, salt=salt, leader=leader) for _ in range(3)]
    if not prefix_caching:
        for request in others:
            request.cache_extras = leader.cache_extras
    assert sim.scheduler.stats().num_waiting == 4
    sim.run()
    assert [request.num_cached_tokens for request in others] == [8, 8, 8]
    assert sim.history[0] == [leader.request_id]
    sim.check_idle()


@pytest.mark.parametrize("end", ["leader", "sibling"])
def test_siblings_start_when_their_leader_is_aborted(simulator: type[Simulator], end: str) -> None:
    sim = simulator(prefix_caching=True)
    leader = sim.add(range(10), outputs=6)
    other = sim.add(range(10), outputs=6, leader=leader)
    sim.abort(leader.request_id if end == "leader" else other.request_id)
    sim.run()
    sim.check_idle()


def test_a_flood_of_prompts_leaves_running_requests_their_pace(simulator: type[Simulator]) -> None:
    sim = simulator(budget=16, max_prefill_tokens=4, max_num_seqs=4)
    sim.add(range(4), outputs=20)
    sim.run(steps=2)
    for _ in range(3):
        sim.add(range(13), outputs=2)
    while sim.scheduler.has_unfinished():
        output = sim.step()
        assert output is not None
        if output.num_decode_rows:
            assert output.num_tokens - output.num_decode_rows <= 4
        sim.retire()
    sim.check_idle()


def test_a_priority_that_would_be_ignored_is_refused(simulator: type[Simulator]) -> None:
    """C6."""
    sim = simulator()
    with pytest.raises(RequestError, match=r"priority=3 would be ignored.*scheduler\.policy: priority"):
        sim.add(range(4), outputs=2, priority=3)


def test_c29_a_reset_makes_everything_unfindable(simulator: type[Simulator]) -> None:
    sim = simulator(prefix_caching=True)
    running = sim.add(range(12), outputs=20)
    sim.run(steps=3)
    sim.kv.reset_prefix_cache()
    sim.run()
    later = sim.add(range(12), outputs=2)
    sim.run()
    assert running.finish_reason == "length"
    assert later.num_cached_tokens == 0
    sim.check_idle()
