"""The token-budget scheduler, case by case, over the simulated device of conftest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest
from enginebay.errors import ConfigError, PluginError, RequestError, RequestTooLargeError
from enginebay.interfaces.scheduler import ModelOutput, Request, RequestStatus, SchedulerContext, SchedulingPolicy
from enginebay.plugins.records import NoOptions
from enginebay.scheduling.scheduler import TokenBudgetScheduler

if TYPE_CHECKING:
    from tests.scheduling.conftest import Simulator


class Priority(SchedulingPolicy):
    """Urgent requests first; they take the place of less urgent ones."""

    uses_priority = True

    def admission_key(self, request: Request) -> tuple[float, ...]:
        return (request.priority, request.arrival)

    def choose_victim(self, running: Sequence[Request]) -> Request:
        return max(running, key=self.admission_key)

    def may_preempt(self, waiting: Request, victim: Request) -> bool:
        return waiting.priority < victim.priority


class Polite(Priority):
    """By priority, but nobody is displaced by a waiting request."""

    def may_preempt(self, waiting: Request, victim: Request) -> bool:
        return False


class Quota(Polite):
    """At most `quota` prompt tokens a step."""

    def __init__(self, quota: int) -> None:
        self.quota = quota

    def prefill_quota(self, num_decode_rows: int, budget: int) -> int:
        return self.quota


class Stranger(Polite):
    """Answers with a request that it was not offered."""

    def choose_victim(self, running: Sequence[Request]) -> Request:
        other = running[0]
        return Request("stranger", other.prompt_token_ids, other.params, frozenset(), 1, seed=0)


def stop_at(simulator: type[Simulator], sim: Simulator, prompt: range, index: int) -> int:
    """A stop id that ends `prompt` with its output `index`, or the test was written for other numbers."""
    outputs, _ = simulator.reference(sim.request(prompt, index + 1))
    assert outputs[index] not in outputs[:index]
    return outputs[index]


# --- composition of a step


def test_a_long_prompt_runs_in_chunks_and_samples_only_at_its_end(simulator: type[Simulator]) -> None:
    sim = simulator(budget=5)
    sim.add(range(12), outputs=2)
    shapes = []
    while (output := sim.step()) is not None:
        shapes.append((output.num_tokens, output.num_decode_rows, output.samples.tolist()))
        sim.retire()
    assert shapes == [(5, 0, [False]), (5, 0, [False]), (2, 0, [True]), (1, 1, [True])]
    sim.check_idle()


def test_decode_rows_come_before_prompt_chunks_and_never_lack_budget(simulator: type[Simulator]) -> None:
    sim = simulator(budget=4)
    sim.add(range(3), outputs=20, name="first")
    sim.run(steps=2)
    sim.add(range(30), outputs=2, name="long")
    sim.add(range(2), outputs=20, name="third")
    for _ in range(10):
        output = sim.step()
        assert output is not None
        assert output.num_scheduled_tokens.tolist() == [1, 3]
        assert output.num_decode_rows == 1
        assert sim.history[-1] == ["first", "long"]
        sim.retire()
    sim.run()
    sim.check_idle()


def test_rows_are_ordered_decode_extend_prefill_by_admission(simulator: type[Simulator]) -> None:
    sim = simulator(budget=8, policy=Quota(6))
    sim.add(range(2), outputs=20, name="a")
    sim.step()
    sim.retire()
    sim.add(range(9), outputs=20, name="b")
    sim.step()
    sim.retire()
    sim.add(range(2), outputs=20, name="c")
    output = sim.step()
    assert output is not None
    assert sim.history[-1] == ["a", "b", "c"]
    assert output.num_decode_rows == 1
    assert output.num_computed_tokens.tolist() == [3, 6, 0]
    assert output.num_scheduled_tokens.tolist() == [1, 3, 2]


def test_nobody_is_admitted_while_decode_rows_fill_the_budget(simulator: type[Simulator]) -> None:
    sim = simulator(budget=2)
    for _ in range(4):
        sim.add(range(1), outputs=4)
    sim.run()
    sim.check_idle()
    assert sim.history == [["r0", "r1"]] * 4 + [["r2", "r3"]] * 4


def test_prefill_quota_bounds_prompt_tokens(simulator: type[Simulator]) -> None:
    sim = simulator(budget=16, policy=Quota(3))
    sim.add(range(10), outputs=3)
    sim.add(range(10), outputs=3)
    while (output := sim.step()) is not None:
        assert output.num_tokens - output.num_decode_rows <= 3
        sim.retire()
    sim.check_idle()


@pytest.mark.parametrize("chunked", [True, False])
def test_a_quota_of_nothing_delays_prompts_but_stops_nobody(simulator: type[Simulator], chunked: bool) -> None:
    sim = simulator(budget=16, policy=Quota(0), chunked_prefill=chunked)
    sim.add(range(5), outputs=3, name="first")
    sim.add(range(5), outputs=3, name="second")
    sim.run()
    sim.check_idle()


def test_without_chunking_a_prompt_waits_until_it_fits_whole(simulator: type[Simulator]) -> None:
    sim = simulator(budget=10, chunked_prefill=False)
    sim.add(range(6), outputs=3)
    sim.add(range(10), outputs=3)
    sim.add(range(1), outputs=3, name="behind")
    sim.run()
    sim.check_idle()
    assert sim.history[0] == ["r0"]
    assert "behind" not in sim.history[1]


# --- steps in flight


def test_steps_in_flight_are_bounded_and_take_placeholders(simulator: type[Simulator]) -> None:
    sim = simulator(concurrent=3)
    sim.add(range(4), outputs=9)
    assert [sim.step() is not None for _ in range(4)] == [True, True, True, False]
    assert [int(step.output.output_index[0]) for step in sim.flying] == [0, 1, 2]
    assert sim.scheduler.stats().num_in_flight_steps == 3
    sim.run()
    sim.check_idle()


def test_no_row_is_spent_beyond_the_last_output(simulator: type[Simulator]) -> None:
    sim = simulator(concurrent=3)
    sim.add(range(4), outputs=2)
    assert [sim.step() is not None for _ in range(3)] == [True, True, False]
    assert sim.scheduler.has_unfinished()
    sim.run()
    assert len(sim.history) == 2
    sim.check_idle()


@pytest.mark.parametrize("concurrent", [1, 2, 3])
def test_c24_stop_at_a_block_edge_with_steps_in_flight_returns_every_block(
    simulator: type[Simulator], concurrent: int
) -> None:
    """C24: prompt and outputs fill two blocks exactly when the stop token is found."""
    sim = simulator(concurrent=concurrent, block_size=4)
    stop = stop_at(simulator, sim, range(5), 2)
    sim.add(range(5), outputs=20, stops=[stop], name="edge")
    sim.run()
    assert len(sim.tokens("edge")) + 5 == 8
    assert sim.received["edge"].finish_reason == "stop"
    assert len(sim.history) >= 3
    sim.check_idle()


def test_blocks_and_slot_stay_until_the_last_step_naming_them_retires(simulator: type[Simulator]) -> None:
    sim = simulator(concurrent=3, max_num_seqs=1)
    sim.add(range(4), outputs=9, name="gone")
    for _ in range(3):
        sim.step()
    free = sim.kv.num_free_blocks
    sim.abort("gone")
    sim.add(range(4), outputs=2, name="next")
    for _ in range(2):
        sim.retire()
        assert sim.kv.num_free_blocks == free
        assert sim.step() is None
    sim.retire()
    assert sim.kv.num_free_blocks == sim.kv.num_blocks
    assert sim.step() is not None
    sim.run()
    sim.check_idle()


@pytest.mark.parametrize("stops", [range(40, 60), [2**40, 2**31]])
def test_stop_ids_too_many_or_too_large_for_the_table_are_honoured(
    simulator: type[Simulator], stops: Sequence[int]
) -> None:
    sim = simulator()
    stop = stop_at(simulator, sim, range(5), 2)
    sim.add(range(5), outputs=20, stops=[*stops, stop], name="r")
    sim.add(range(5), outputs=6, name="other")
    sim.run()
    assert len(sim.tokens("r")) == 3
    sim.check_idle()


# --- blocks run short


def pressed(simulator: type[Simulator], policy: SchedulingPolicy, concurrent: int = 1) -> Simulator:
    """Three requests that fill the pool two thirds through: a and b, then the most urgent c, in order of admission."""
    sim = simulator(policy=policy, usable_blocks=32, concurrent=concurrent, budget=32)
    for name, priority in (("a", 5), ("b", 3), ("c", 1)):
        sim.add(range(4), outputs=50, priority=priority, name=name)
        sim.step()
        if len(sim.flying) == concurrent:
            sim.retire()
    return sim


def run_to_preemption(sim: Simulator) -> None:
    """Stop with the preempting step, if there is one, and those before it still in flight."""
    while True:
        output = sim.step()
        if sim.scheduler.stats().num_preemptions:
            break
        if output is None or len(sim.flying) == sim.context.max_concurrent_batches:
            sim.retire()


def test_c18_a_victim_already_scheduled_in_this_step_loses_its_share(simulator: type[Simulator]) -> None:
    """C18: a, first in the step and least urgent, gives way to c, which comes after it."""
    sim = pressed(simulator, Priority())
    run_to_preemption(sim)
    assert sim.received["a"].request.status is RequestStatus.PREEMPTED
    assert sim.received["a"].request.num_preemptions == 1
    sim.run()
    sim.check_idle()


def test_c19_nobody_else_is_skipped_in_the_step_of_a_preemption(simulator: type[Simulator]) -> None:
    """C19: b and c run in the step before a's preemption, in that very step, and in the next."""
    sim = pressed(simulator, Priority())
    run_to_preemption(sim)
    assert sorted(sim.history[-2]) == ["a", "b", "c"]
    assert sim.history[-1] == ["b", "c"]
    sim.retire()
    sim.step()
    assert sim.history[-1] == ["b", "c"]


@pytest.mark.parametrize("concurrent", [1, 2, 3])
def test_preemption_changes_no_token_and_keeps_seniority(simulator: type[Simulator], concurrent: int) -> None:
    sim = pressed(simulator, Polite(), concurrent)
    sim.add(range(3), outputs=50, priority=9, name="late")
    sim.run()
    assert sim.scheduler.stats().num_preemptions > 0
    assert sim.received["c"].request.num_preemptions == 0
    sim.check_idle()


def test_tokens_in_flight_of_a_preempted_request_are_delivered(simulator: type[Simulator]) -> None:
    sim = pressed(simulator, Priority(), concurrent=2)
    run_to_preemption(sim)
    victim = sim.received["a"].request
    assert victim.status is RequestStatus.PREEMPTED
    known = len(victim.output_token_ids)
    sim.retire()
    assert len(victim.output_token_ids) == known + 1
    sim.run()
    sim.check_idle()


def test_a_preempted_request_may_end_with_a_token_that_was_in_flight(simulator: type[Simulator]) -> None:
    """The token that stops it comes back after it was sent to the queue; it must not run again."""
    sim = pressed(simulator, Priority(), concurrent=2)
    run_to_preemption(sim)
    victim = sim.received["a"].request
    # The last allowed output is the one in flight, as if max_tokens had been so from the start.
    slots = sim.scheduler._slots
    (slot,) = (s for s, r in slots.requests.items() if r is victim)
    victim.max_output_tokens = len(victim.output_token_ids) + 1
    slots.max_outputs[slot] = victim.max_output_tokens
    sim.run()
    assert victim.finish_reason == "length"
    sim.check_idle()


def test_c23_pressure_does_not_turn_into_recomputation_without_end(simulator: type[Simulator]) -> None:
    """C23: with a third of the blocks that all want, less than half of the work is done twice."""
    sim = simulator(policy=Polite(), usable_blocks=40, max_num_seqs=8, budget=64, concurrent=2)
    for _ in range(24):
        sim.add(range(8), outputs=50)
    computed = 0
    while sim.scheduler.has_unfinished():
        output = sim.step()
        computed += 0 if output is None else output.num_tokens
        if output is None or len(sim.flying) == 2:
            sim.retire()
    assert sim.scheduler.stats().num_preemptions > 0
    assert computed < 1.5 * 24 * 57
    sim.check_idle()


def test_nobody_is_admitted_in_the_step_of_a_preemption_or_without_blocks_for_all_it_knows(
    simulator: type[Simulator],
) -> None:
    sim = pressed(simulator, Polite())
    sim.add(range(1), outputs=1, priority=9, name="tiny")
    sim.run(steps=1)
    assert "tiny" in sim.history[-1]
    sim.add(range(40), outputs=9, priority=9, name="large")
    run_to_preemption(sim)
    assert not {"a", "large"} & set(sim.history[-1])
    while "large" not in sim.history[-1]:
        free = sim.kv.num_free_blocks
        sim.run(steps=1)
    assert free >= 10
    sim.run()
    sim.check_idle()


def test_a_policy_that_chooses_a_stranger_is_named(simulator: type[Simulator]) -> None:
    sim = pressed(simulator, Stranger())
    with pytest.raises(PluginError, match=r"scheduling policy Stranger: choose_victim returned .*stranger"):
        run_to_preemption(sim)


# --- seats run short


@pytest.mark.parametrize("concurrent", [1, 2])
def test_c20_an_urgent_arrival_takes_a_seat_where_the_policy_says_so(
    simulator: type[Simulator], concurrent: int
) -> None:
    """C20: seats, not memory, are short."""
    sim = simulator(policy=Priority(), max_num_seqs=2, concurrent=concurrent)
    sim.add(range(4), outputs=30, priority=5, name="low")
    sim.add(range(4), outputs=30, priority=4, name="middle")
    sim.run(steps=4)
    sim.add(range(4), outputs=5, priority=0, name="urgent")
    sim.run(steps=2 * concurrent)
    assert sim.received["low"].request.status is RequestStatus.PREEMPTED
    assert "urgent" in sim.history[-1]
    sim.run()
    assert sim.scheduler.stats().num_preemptions == 1
    sim.check_idle()


def test_c20_it_waits_where_the_policy_says_no(simulator: type[Simulator]) -> None:
    sim = simulator(policy=Polite(), max_num_seqs=2)
    sim.add(range(4), outputs=30, priority=5)
    sim.add(range(4), outputs=30, priority=4)
    sim.run(steps=4)
    sim.add(range(4), outputs=5, priority=0, name="urgent")
    sim.run()
    assert sim.scheduler.stats().num_preemptions == 0
    assert sim.history.index(["urgent"]) >= 29
    sim.check_idle()


# --- requests at the door


def test_c21_a_prompt_larger_than_the_pool_is_refused_and_blocks_nobody(simulator: type[Simulator]) -> None:
    """C21: under max_model_len, over the KV pool."""
    sim = simulator(usable_blocks=8)
    large = sim.request(range(40), outputs=2, name="large")
    message = sim.scheduler.admission_error(large)
    assert message is not None
    assert "request large: 40 prompt and 2 output tokens exceed the whole KV cache of 8 blocks" in message
    with pytest.raises(RequestTooLargeError, match="request large"):
        sim.scheduler.add(large)
    sim.add(range(4), outputs=2)
    sim.run()
    sim.check_idle()


def test_c25_a_sequence_that_would_outgrow_the_cache_is_refused(simulator: type[Simulator]) -> None:
    """C25: the last output needs no block, so 33 tokens fit 32 places and 34 do not."""
    sim = simulator(usable_blocks=8)
    assert "whole KV cache" in (sim.scheduler.admission_error(sim.request(range(4), outputs=30)) or "")
    sim.add(range(4), outputs=29)
    sim.run()
    sim.check_idle()


def test_what_cannot_run_is_refused_with_numbers(simulator: type[Simulator]) -> None:
    sim = simulator(max_model_len=32, budget=8, chunked_prefill=False)
    error = sim.scheduler.admission_error
    assert "max_model_len=32" in (error(sim.request(range(4), outputs=29)) or "")
    assert "max_model_len=32" in (error(sim.request(range(32), outputs=0)) or "")
    assert "max_num_batched_tokens=8" in (error(sim.request(range(9), outputs=2)) or "")
    assert "prompt is empty" in (error(sim.request([], outputs=2)) or "")
    assert error(sim.request(range(8), outputs=24)) is None


def test_without_chunking_a_request_that_outgrew_the_budget_still_resumes(simulator: type[Simulator]) -> None:
    sim = simulator(policy=Priority(), max_num_seqs=1, budget=8, chunked_prefill=False)
    sim.add(range(8), outputs=20, priority=5, name="low")
    sim.run(steps=6)
    sim.add(range(4), outputs=3, priority=0, name="urgent")
    sim.run()
    assert sim.received["low"].request.num_preemptions == 1
    sim.check_idle()


def test_an_id_in_use_is_refused_and_free_again_once_finished(simulator: type[Simulator]) -> None:
    sim = simulator()
    sim.add(range(4), outputs=2, name="r")
    with pytest.raises(RequestError, match="request r"):
        sim.scheduler.add(sim.request(range(4), outputs=2, name="r"))
    sim.run()
    sim.add(range(4), outputs=2, name="r")
    sim.run()
    sim.check_idle()


def test_a_context_without_policy_is_refused(simulator: type[Simulator]) -> None:
    context = SchedulerContext(
        kv=simulator().kv,
        max_num_seqs=1,
        max_num_batched_tokens=1,
        max_model_len=8,
        chunked_prefill=True,
        max_concurrent_batches=1,
        policy=None,
        options=NoOptions(),
    )
    with pytest.raises(ConfigError, match=r"scheduler\.policy"):
        TokenBudgetScheduler(context)


# --- life cycle


@pytest.mark.parametrize("concurrent", [1, 2, 3])
@pytest.mark.parametrize("state", ["waiting", "mid-prompt", "decoding", "preempted", "finished", "unknown"])
def test_c47_abort_in_every_state_returns_the_free_count(
    simulator: type[Simulator], state: str, concurrent: int
) -> None:
    """C47: the aborted request gets one last delta and nothing after it; the others are not disturbed."""
    if state == "preempted":
        sim = pressed(simulator, Priority(), concurrent)
        run_to_preemption(sim)
        name = "a"
        assert sim.received[name].request.status is RequestStatus.PREEMPTED
    else:
        sim = simulator(concurrent=concurrent, budget=6, max_num_seqs=2)
        sim.add(range(3), outputs=20)
        sim.add(range(14), outputs=3 if state == "finished" else 20, name="x")
        sim.add(range(3), outputs=20, name="third")
        name = {"waiting": "third", "unknown": "nobody"}.get(state, "x")
        sim.run(steps={"mid-prompt": 2, "finished": 14}.get(state, 7))
        status = sim.received[name].request.status.value if state != "unknown" else "unknown"
        assert status == {"mid-prompt": "running", "decoding": "running"}.get(state, state)
        if state in ("mid-prompt", "decoding"):
            slots, seat = sim.scheduler._slots, sim.received[name].request.slot
            assert bool(slots.num_computed[seat] < slots.num_prefill[seat]) == (state == "mid-prompt")
    sim.abort(name, name)
    if state not in ("finished", "unknown"):
        assert sim.received[name].finish_reason == "abort"
    sim.run()
    sim.check_idle()


def test_abort_of_everything_with_steps_in_flight_ends_idle(simulator: type[Simulator]) -> None:
    sim = simulator(concurrent=2)
    for _ in range(6):
        sim.add(range(5), outputs=9)
    sim.step()
    sim.step()
    sim.abort(*sim.received)
    assert sim.scheduler.has_unfinished(), "steps are in flight"
    sim.run()
    assert not sim.scheduler.has_unfinished()
    assert sim.scheduler.schedule() is None
    sim.check_idle()


def test_stats_count_what_is_where(simulator: type[Simulator]) -> None:
    sim = simulator(max_num_seqs=2, usable_blocks=20)
    for _ in range(3):
        sim.add(range(5), outputs=4)
    sim.step()
    stats = sim.scheduler.stats()
    assert (stats.num_waiting, stats.num_running, stats.num_in_flight_steps) == (1, 2, 1)
    assert (stats.num_blocks, stats.num_free_blocks, stats.num_preemptions) == (20, 16, 0)


def test_a_result_out_of_order_or_without_its_tokens_is_an_internal_error(simulator: type[Simulator]) -> None:
    sim = simulator(concurrent=2)
    sim.add(range(4), outputs=5)
    first, second = sim.step(), sim.step()
    assert first is not None
    assert second is not None
    nothing = ModelOutput(np.zeros((1, 1), np.int32), np.zeros(1, np.int32))
    with pytest.raises(RuntimeError, match="step 1 came back"):
        sim.scheduler.update(second, nothing)
    with pytest.raises(RuntimeError, match="step 0 has a sampling row"):
        sim.scheduler.update(first, nothing)
