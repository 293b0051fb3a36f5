"""Delivery: what a retired step gave each request, and which of them end with it.

It knows the slot table's counters and the requests in it; it does not know queues, blocks or policies. A step without
log-probabilities costs one small object a token, and array work otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from enginebay.interfaces.scheduler import (
    FinishReason,
    Int32Array,
    ModelOutput,
    Request,
    RequestOutputDelta,
    SchedulerOutput,
)
from enginebay.scheduling.slots import FINISHED, SlotTable


@dataclass(slots=True)
class Delivered:
    """The outcome of a step."""

    deltas: list[RequestOutputDelta]
    #: requests that end, and why
    ended: list[tuple[Request, FinishReason]]


class Delivery:
    """Hands a step's tokens to the requests of a slot table."""

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots

    def deliver(self, output: SchedulerOutput, result: ModelOutput) -> Delivered:
        """Append each row's token to its request; rows whose request has ended meanwhile are dropped."""
        t = self._slots
        alive = t.state[output.slots] != FINISHED
        rows = np.flatnonzero(output.samples & alive)
        if not (result.num_sampled[rows] == 1).all():
            raise RuntimeError(f"scheduler: step {output.step} has a sampling row without exactly one token")
        slots, tokens = output.slots[rows], result.token_ids[rows, 0]
        t.num_outputs[slots] += 1
        requests, deltas = t.requests, []
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            request = requests[slot]
            request.output_token_ids.append(token)
            deltas.append(RequestOutputDelta(request.request_id, [token]))
        delivered = Delivered(deltas, [])
        for i in np.flatnonzero(t.num_outputs[slots] == 1).tolist():
            _introduce(deltas[i], requests[int(slots[i])])
        if result.logprobs is not None:
            self._add_logprobs(rows, slots, result, deltas)
        if result.prompt_logprobs:
            self._add_prompt_logprobs(output, alive, rows, result, delivered)
        self._end(slots, tokens, delivered)
        return delivered

    def _end(self, slots: Int32Array, tokens: Int32Array, delivered: Delivered) -> None:
        """Find the requests whose newest token stops them, is their last, or could not be drawn."""
        t = self._slots
        stopped = (t.stop_ids[slots] == tokens[:, None]).any(axis=1) & (tokens >= 0)
        for i in np.flatnonzero(t.look_up_stops[slots]).tolist():
            stopped[i] = int(tokens[i]) in t.requests[int(slots[i])].stop_token_ids
        ends = stopped | (t.num_outputs[slots] >= t.max_outputs[slots]) | (tokens < 0)
        for i in np.flatnonzero(ends).tolist():
            delta, request = delivered.deltas[i], t.requests[int(slots[i])]
            if tokens[i] < 0:
                t.num_outputs[slots[i]] -= 1
                _refuse(delta, request)
            elif stopped[i]:
                delta.finish_reason, delta.stop_token_id = "stop", int(tokens[i])
            else:
                delta.finish_reason = "length"
            assert delta.finish_reason is not None
            delivered.ended.append((request, delta.finish_reason))

    def _add_logprobs(
        self, rows: np.ndarray, slots: Int32Array, result: ModelOutput, deltas: list[RequestOutputDelta]
    ) -> None:
        assert result.logprobs is not None
        for row, slot, delta in zip(rows.tolist(), slots.tolist(), deltas, strict=True):
            wanted = self._slots.requests[slot].params.logprobs
            if wanted is not None:
                most = result.logprobs.token_ids.shape[1] - 1
                delta.logprobs = result.logprobs.of(row, most if wanted < 0 else wanted)

    def _add_prompt_logprobs(
        self, output: SchedulerOutput, alive: np.ndarray, rows: np.ndarray, result: ModelOutput, delivered: Delivered
    ) -> None:
        """A row amid its prompt has no token, but may have scores."""
        delta_of_row = dict(zip(rows.tolist(), delivered.deltas, strict=True))
        for row, scores in result.prompt_logprobs.items():
            if not alive[row]:
                continue
            delta = delta_of_row.get(row)
            if delta is None:
                request = self._slots.requests[int(output.slots[row])]
                delta = RequestOutputDelta(request.request_id, [])
                delivered.deltas.append(delta)
            delta.prompt_logprobs = scores


def ended_early(request: Request, reason: FinishReason) -> RequestOutputDelta:
    """The delta of a request that ends between steps."""
    delta = RequestOutputDelta(request.request_id, [], reason)
    if not request.output_token_ids:
        _introduce(delta, request)
    return delta


def _introduce(delta: RequestOutputDelta, request: Request) -> None:
    """What is said of a request once."""
    delta.first_scheduled = request.first_scheduled
    delta.num_cached_tokens = request.num_cached_tokens


def _refuse(delta: RequestOutputDelta, request: Request) -> None:
    """Take back the mark that stands for a token which could not be drawn."""
    request.output_token_ids.pop()
    delta.new_token_ids.clear()
    delta.logprobs = None
    delta.finish_reason = "error"
    delta.error = (
        "no token was left to draw: allowed_token_ids, bad_words, logit_bias, min_tokens or a logits processor together "
        "forbid the whole vocabulary"
    )
