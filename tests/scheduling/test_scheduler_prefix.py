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


@pytest.mark.parametrize("concurrent", [1, 2, 3])
def test_who_shares_a_prefix_that_is_being_computed_waits_for_it(simulator: type[Simulator], concurrent: int) -> None:
    """Nothing is found before its step has retired, and nothing is computed twice meanwhile."""
    sim = simulator(prefix_caching=True, concurrent=concurrent)
    first = sim.add(range(12), outputs=6)
    others = [sim.add([*range(8), 9, 9, 9, i], outputs=6) for i in range(3)]
    unlike = sim.add(range(1, 9), outputs=6)
    sim.step()
    assert sim.history == [[first.request_id]]
    sim.run()
    assert [request.num_cached_tokens for request in (first, *others, unlike)] == [0, 8, 8, 8, 0]
    sim.check_idle()


def test_a_long_prefix_is_waited_for_block_by_block(simulator: type[Simulator]) -> None:
    sim = simulator(prefix_caching=True, budget=8)
    sim.add(range(30), outputs=2)
    second = sim.add(range(30), outputs=2)
    sim.run()
    assert second.num_cached_tokens == 28
    sim.check_idle()


@pytest.mark.parametrize("state", ["running", "preempted"])
def test_a_prefix_that_is_no_longer_computed_is_not_waited_for(simulator: type[Simulator], state: str) -> None:
    sim = simulator(prefix_caching=True, budget=4, policy=UrgentFirst(), max_num_seqs=1 if state == "preempted" else 4)
    first = sim.add(range(20), outputs=4, priority=1)
    sim.run(steps=2)
    second = sim.add(range(20), outputs=4, priority=0 if state == "preempted" else 1)
    if state == "running":
        sim.abort(first.request_id)
    sim.run()
    assert second.num_cached_tokens in (4, 8)
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
def test_a_family_shares_its_prompt_where_caching_is_off(simulator: type[Simulator], concurrent: int) -> None:
    sim = simulator(prefix_caching=False, concurrent=concurrent)
    family = [sim.add(range(10), outputs=6) for _ in range(4)]
    for request in family:
        request.cache_extras = (("family", "1"),)
    stranger = sim.add(range(10), outputs=6)
    sim.run()
    assert [request.num_cached_tokens for request in (*family, stranger)] == [0, 8, 8, 8, 0]
    assert sim.history[0] == [family[0].request_id]
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
