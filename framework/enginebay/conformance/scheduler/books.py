"""What a scheduler writes down: the fields of each request, its counters, and what a delta says beside tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginebay.interfaces.scheduler import RequestOutputDelta, RequestStatus

if TYPE_CHECKING:
    from enginebay.conformance.scheduler.simulator import Received, Simulator

_WAITS = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def check(sim: Simulator) -> None:
    """Request fields and counters, between any two calls."""
    for got in sim.received.values():
        _check_fields(sim, got)
    stats, unfinished = sim.scheduler.stats(), sim.unfinished
    wanted = {
        "num_waiting": sum(got.request.status in _WAITS for got in unfinished),
        "num_running": sum(got.request.status is RequestStatus.RUNNING for got in unfinished),
        "num_in_flight_steps": len(sim.flying),
        "num_free_blocks": sim.kv.num_free_blocks,
        "num_blocks": sim.kv.num_blocks,
        "num_preemptions": sum(got.request.num_preemptions for got in sim.received.values()),
        "num_prefix_queries": sim.kv.prefix_stats[0],
        "num_prefix_hits": sim.kv.prefix_stats[1],
    }
    for name, value in wanted.items():
        if (found := getattr(stats, name)) != value:
            sim.watch.fail("stats", "stats: {} is {}, should be {}", name, found, value)
    left = bool(unfinished or sim.flying)
    sim.watch.expect("stats", sim.scheduler.has_unfinished() == left, "has_unfinished is not {}", left)


def check_delta(sim: Simulator, got: Received, delta: RequestOutputDelta) -> None:
    """The first delta with a token, or the last, says when the request began and what the cache held of it."""
    request = got.request
    said = (delta.first_scheduled, delta.num_cached_tokens)
    first = not got.tokens and (bool(delta.new_token_ids) or delta.finish_reason is not None)
    due = (request.first_scheduled, request.num_cached_tokens) if first else (None, None)
    text = "{}: a delta with first_scheduled, num_cached_tokens = {}, should be {}"
    sim.watch.expect("fields", said == due, text, request.request_id, said, due)


def _check_fields(sim: Simulator, got: Received) -> None:
    """The state of a request is where it is, and its counts are what happened."""
    request, times = got.request, len(got.seated)
    preempted = times - 1 if times else 0
    if got.finish_reason is not None:
        state = RequestStatus.FINISHED
    elif times == 0:
        state = RequestStatus.WAITING
    elif request.num_preemptions == times:
        state = RequestStatus.PREEMPTED
    else:
        state = RequestStatus.RUNNING
    if state in (RequestStatus.FINISHED, RequestStatus.PREEMPTED) and request.num_preemptions == times:
        preempted = times
    name = request.request_id
    text = "{}: its {} is {} after it was seated {} time(s) and ended by {}"
    for field, right in (
        ("status", request.status is state),
        ("slot", (request.slot >= 0) == (request.status is RequestStatus.RUNNING)),
        ("output_token_ids", request.output_token_ids == got.tokens),
        ("finish_reason", request.finish_reason == got.finish_reason),
        ("num_preemptions", request.num_preemptions == preempted),
        ("num_cached_tokens", request.num_cached_tokens == (got.seated[0] if got.seated else 0)),
        ("first_scheduled", (request.first_scheduled is None) == (times == 0)),
    ):
        if not right:
            sim.watch.fail("fields", text, name, field, getattr(request, field), times, got.finish_reason)
