"""Who runs and who waits: checks of a step against the budget, the requests' states, and those who came before.

It sees a simulation right after a step was composed. It does not know blocks' contents or tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginebay.conformance.scheduler.watch import Topic
from enginebay.interfaces.scheduler import Request, RequestStatus, SchedulerOutput

if TYPE_CHECKING:
    from enginebay.conformance.scheduler.simulator import Simulator


def check_budget(sim: Simulator, output: SchedulerOutput) -> None:
    """The step's tokens are within ``max_num_batched_tokens``, prompts beside decode rows within ``max_prefill_tokens``."""
    budget, most = sim.arrangement.budget, sim.arrangement.max_prefill_tokens
    tokens, prompts = output.num_tokens, int(output.num_scheduled_tokens[output.num_decode_rows :].sum())
    sim.watch.expect("budget", tokens <= budget, "a step of {} tokens, allowed are {}", tokens, budget)
    text = "{} prompt tokens beside {} decode rows, max_prefill_tokens is {}"
    within = most is None or output.num_decode_rows == 0 or prompts <= most
    sim.watch.expect("budget", within, text, prompts, output.num_decode_rows, most)


def check_running(sim: Simulator, output: SchedulerOutput) -> None:
    """Every row is of a request that runs, in the slot that it says; what is not even well-formed is left to the device."""
    entering = {new.slot: new.request_id for new in output.new_requests}
    for slot in output.slots.tolist():
        seat = sim.device.seats.get(slot)
        got = sim.received.get(entering.get(slot, seat.request.request_id if seat else ""))
        if got is None:
            continue
        request = got.request
        runs = request.status is RequestStatus.RUNNING
        text = "{} has a row, but is {}"
        sim.watch.expect(_why_not(request), runs, text, request.request_id, request.status.value)
        text = "{} has a row of slot {}, but says that its slot is {}"
        sim.watch.expect("seats", request.slot == slot, text, request.request_id, slot, request.slot)


def check_turns(sim: Simulator, output: SchedulerOutput) -> None:
    """Nobody is skipped, and nobody overtakes his elders."""
    _check_skipped(sim, output)
    for new in output.new_requests:
        _check_seniority(sim, sim.received[new.request_id].request)


def _why_not(request: Request) -> Topic:
    """The topic of a row that should not be, by what became of its request."""
    if request.finish_reason == "abort":
        return "abort"
    return "preemption" if request.status is RequestStatus.PREEMPTED else "running"


def _check_skipped(sim: Simulator, output: SchedulerOutput) -> None:
    """C19: a step that decodes, with nothing else in flight, decodes everyone for whom there are tokens and blocks."""
    if sim.flying or not output.num_decode_rows or output.num_tokens >= sim.arrangement.budget:
        return
    rows = set(output.slots.tolist())
    left_out = [
        seat
        for slot, seat in sim.device.seats.items()
        if slot not in rows
        and seat.request.slot == slot
        and seat.request.status is RequestStatus.RUNNING
        and seat.wants_a_token
    ]
    lacking = sum(map(sim.device.missing, left_out))
    skipped = bool(left_out) and lacking <= sim.kv.num_free_blocks
    names = [seat.request.request_id for seat in left_out]
    text = "C19: {} could decode, but are left out of a step of {} tokens, with {} free blocks"
    sim.watch.expect("skipping", not skipped, text, names, output.num_tokens, sim.kv.num_free_blocks)


def _check_seniority(sim: Simulator, admitted: Request) -> None:
    """Whoever precedes a newly seated request runs already: by the policy's order, or an equal that came earlier."""
    in_flight = {name for step in sim.flying for name in step.named}
    for got in sim.unfinished:
        other, text = got.request, "{} was seated before {}, which came first"
        waits = other.status is not RequestStatus.RUNNING
        older = other.arrival < admitted.arrival and equals(other, admitted) and other.request_id not in in_flight
        sim.watch.expect("seniority", not (older and waits), text, admitted.request_id, other.request_id)
        if sim.policy is not None:
            keys = [(sim.policy.admission_key(request), request.arrival) for request in (other, admitted)]
            precedes = keys[0] < keys[1]
            text = "{} was seated before {}, which comes first in the policy's order"
            sim.watch.expect("seniority", not (precedes and waits), text, admitted.request_id, other.request_id)


def equals(one: Request, other: Request) -> bool:
    """Whether two requests ask for the same, of the same rank."""
    return (
        one.prompt_token_ids.tolist() == other.prompt_token_ids.tolist()
        and one.max_output_tokens == other.max_output_tokens
        and one.stop_token_ids == other.stop_token_ids
        and one.priority == other.priority
        and one.cache_extras == other.cache_extras
    )
