"""Laws of the scheduler under any arrangement: random loads, tiny pools, odd policies, aborts, steps in flight.

The simulator of conftest checks each step; here are the loads, and what must hold when all is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from enginebay.errors import RequestTooLargeError
from enginebay.interfaces.scheduler import Request, SchedulingPolicy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from tests.scheduling.conftest import Simulator

modest = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass
class Odd(SchedulingPolicy):
    """A policy that is allowed, whether or not it is sensible."""

    uses_priority = True

    by_priority: bool
    pick: int
    displaces: bool
    quota: int

    def admission_key(self, request: Request) -> tuple[float, ...]:
        return (request.priority, request.arrival) if self.by_priority else (request.arrival,)

    def choose_victim(self, running: Sequence[Request]) -> Request:
        return running[self.pick % len(running)]

    def may_preempt(self, waiting: Request, victim: Request) -> bool:
        return self.displaces

    def prefill_quota(self, num_decode_rows: int, budget: int) -> int:
        return self.quota


policies = st.builds(Odd, st.booleans(), st.integers(-3, 3), st.booleans(), st.one_of(st.just(100), st.integers(-1, 4)))
arrangements = st.fixed_dictionaries(
    {
        "policy": policies,
        "windows": st.lists(st.one_of(st.none(), st.integers(1, 9)), min_size=1, max_size=2),
        "prefix_caching": st.booleans(),
        "max_prefill_tokens": st.one_of(st.none(), st.integers(1, 8)),
        "block_size": st.integers(1, 4),
        "usable_blocks": st.integers(4, 24),
        "max_num_seqs": st.integers(1, 5),
        "budget": st.integers(1, 12),
        "chunked_prefill": st.booleans(),
        "concurrent": st.integers(1, 3),
        "max_model_len": st.integers(8, 40),
    }
)
loads = st.tuples(
    st.lists(st.integers(0, 12), min_size=1, max_size=12),
    st.integers(1, 24),
    st.sets(st.integers(0, 12), max_size=2),
    st.integers(0, 2),
)
heavy_loads = st.tuples(
    st.lists(st.integers(0, 12), min_size=1, max_size=6),
    st.integers(12, 24),
    st.sets(st.integers(0, 12), max_size=1),
    st.integers(0, 2),
)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), loads),
        st.tuples(st.just("step"), st.none()),
        st.tuples(st.just("retire"), st.none()),
        st.tuples(st.just("run"), st.integers(1, 8)),
        st.tuples(st.just("abort"), st.integers(0, 20)),
    ),
    min_size=3,
    max_size=40,
)


def offer(sim: Simulator, load: tuple[list[int], int, set[int], int]) -> None:
    """Add a request, or see it refused for the reason that admission gives."""
    prompt, outputs, stops, priority = load
    error = sim.scheduler.admission_error(sim.request(prompt, outputs, stops, priority))
    if error is None:
        sim.add(prompt, outputs, stops, priority)
    else:
        with pytest.raises(RequestTooLargeError):
            sim.add(prompt, outputs, stops, priority)


@pytest.mark.parametrize("headroom", [0, 2, 32])
def test_any_life_ends_idle_with_the_right_tokens_c22_c24_c47(simulator: type[Simulator], headroom: int) -> None:
    """C22, C24, C47: whatever happens in whatever order, all ends, everything comes back, no token differs."""

    @modest
    @given(arrangements, actions)
    def law(arrangement: dict[str, object], life: list[tuple[str, object]]) -> None:
        sim = simulator(**arrangement)  # type: ignore[arg-type]
        for action, value in life:
            if action == "add":
                offer(sim, value)  # type: ignore[arg-type]
            elif action == "step":
                sim.step()
            elif action == "retire" and sim.flying:
                sim.retire()
            elif action == "run" and sim.scheduler.has_unfinished():
                for _ in range(int(str(value))):
                    if sim.scheduler.has_unfinished():
                        sim.run(steps=1)
            elif action == "abort":
                sim.abort(f"r{value}")
            stats = sim.scheduler.stats()
            assert stats.num_running <= sim.context.max_num_seqs
            assert stats.num_in_flight_steps == len(sim.flying) <= sim.context.max_concurrent_batches
        sim.run()
        sim.check_idle()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("enginebay.scheduling.headroom.LEAST", headroom)
        law()


def test_pressure_ends_with_the_right_tokens_and_the_first_is_never_preempted(simulator: type[Simulator]) -> None:
    """C22, C25: all arrive at once and want several times the pool; the most senior one is never sent back."""
    preemptions = 0

    @modest
    @given(
        arrangements,
        st.lists(heavy_loads, min_size=3, max_size=8),
        st.integers(0, 2),
    )
    def law(arrangement: dict[str, object], requests: list[tuple[list[int], int, set[int], int]], slack: int) -> None:
        nonlocal preemptions
        windows, block_size = arrangement["windows"], int(str(arrangement["block_size"]))
        assert isinstance(windows, list)
        longest = max(len(prompt) + outputs for prompt, outputs, _, _ in requests)
        arrangement |= {"usable_blocks": len(windows) * (-(-longest // block_size) + slack), "max_model_len": 40}
        arrangement |= {"max_num_seqs": 4, "budget": 4 + int(str(arrangement["budget"]))}
        sim = simulator(**arrangement)  # type: ignore[arg-type]
        for load in requests:
            offer(sim, load)
        sim.run()
        sim.check_idle()
        preemptions += sim.scheduler.stats().num_preemptions
        policy = sim.policy
        assert policy is not None
        if sim.received:
            first = min((got.request for got in sim.received.values()), key=policy.admission_key)
            assert first.num_preemptions == 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("enginebay.scheduling.headroom.LEAST", 0)
        law()
    assert preemptions > 0, "the loads were meant to press"
