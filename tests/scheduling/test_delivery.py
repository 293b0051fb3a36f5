"""Delivery: tokens, scores and ends of a retired step."""

from __future__ import annotations

import numpy as np
import pytest
from enginebay.interfaces.scheduler import ModelOutput, PromptLogprobs, Request, SchedulerOutput, TokenLogprobs
from enginebay.sampling.params import SamplingParams
from enginebay.scheduling.delivery import Delivery, ended_early
from enginebay.scheduling.slots import FINISHED, SlotTable


def seated(
    table: SlotTable, name: str, params: SamplingParams | None = None, stops: frozenset[int] = frozenset()
) -> Request:
    made = Request(name, np.arange(5, dtype=np.int32), params or SamplingParams(), stops, 3, seed=0)
    made.first_scheduled, made.num_cached_tokens = 12.5, 4
    table.seat(made, 4)
    return made


def step(samples: list[bool]) -> SchedulerOutput:
    rows = len(samples)
    counts = np.ones(rows, np.int32)
    return SchedulerOutput(
        0, [], np.arange(rows, dtype=np.int32), counts, counts * 4, 0, np.array(samples), counts * 0, ()
    )


def result(tokens: list[int], samples: list[bool], width: int | None = None) -> ModelOutput:
    logprobs = None
    if width is not None:
        ids = np.arange(len(tokens) * width, dtype=np.int32).reshape(len(tokens), width)
        logprobs = TokenLogprobs(ids, -ids.astype(np.float32), np.ones(len(tokens), np.int32))
    return ModelOutput(np.array(tokens, np.int32)[:, None], np.array(samples, np.int32), logprobs)


def test_tokens_reach_their_requests_and_say_once_when_they_began() -> None:
    table = SlotTable(2)
    a, b = seated(table, "a"), seated(table, "b")
    delivery = Delivery(table)
    first = delivery.deliver(step([True, True]), result([7, 8], [True, True]))
    second = delivery.deliver(step([True, True]), result([9, 6], [True, True]))
    assert (a.output_token_ids, b.output_token_ids) == ([7, 9], [8, 6])
    assert [(d.first_scheduled, d.num_cached_tokens) for d in first.deltas] == [(12.5, 4)] * 2
    assert [(d.first_scheduled, d.num_cached_tokens) for d in second.deltas] == [(None, None)] * 2
    assert (first.ended, second.ended) == ([], [])


def test_ends_by_stop_id_by_length_and_by_error() -> None:
    table = SlotTable(4)
    stop, wide = seated(table, "stop", stops=frozenset({7})), seated(table, "wide", stops=frozenset(range(100)))
    length, barred = seated(table, "length"), seated(table, "barred")
    table.num_outputs[length.slot] = 2
    out = Delivery(table).deliver(step([True] * 4), result([7, 99, 7, -1], [True] * 4))
    assert out.ended == [(stop, "stop"), (wide, "stop"), (length, "length"), (barred, "error")]
    assert [d.stop_token_id for d in out.deltas] == [7, 99, None, None]
    assert barred.output_token_ids == out.deltas[3].new_token_ids == []
    assert "no token was left to draw" in str(out.deltas[3].error)


def test_scores_are_cut_to_what_each_request_asks() -> None:
    table = SlotTable(3)
    for wanted in (2, None, -1):
        seated(table, str(wanted), SamplingParams(logprobs=wanted))
    two, none, every = Delivery(table).deliver(step([True] * 3), result([1, 2, 3], [True] * 3, width=5)).deltas
    assert two.logprobs is not None
    assert two.logprobs.token_ids.tolist() == [[0, 1, 2]]
    assert none.logprobs is None
    assert every.logprobs is not None
    assert every.logprobs.token_ids.tolist() == [[10, 11, 12, 13, 14]]


def test_prompt_scores_come_with_a_token_or_alone() -> None:
    table = SlotTable(3)
    for name in ("amid", "done", "ended"):
        seated(table, name)
    table.state[2] = FINISHED
    output = result([0, 8, 9], [False, True, False])
    scores = TokenLogprobs(np.zeros((1, 1), np.int32), np.zeros((1, 1), np.float32), np.ones(1, np.int32))
    output.prompt_logprobs = {row: PromptLogprobs(row + 1, scores) for row in range(3)}
    deltas = {d.request_id: d for d in Delivery(table).deliver(step([False, True, False]), output).deltas}
    assert set(deltas) == {"amid", "done"}
    assert (deltas["amid"].new_token_ids, deltas["done"].new_token_ids) == ([], [8])
    assert [d.prompt_logprobs.start for d in deltas.values() if d.prompt_logprobs] == [2, 1]


def test_a_sampling_row_without_its_token_is_an_internal_error() -> None:
    table = SlotTable(1)
    seated(table, "a")
    with pytest.raises(RuntimeError, match="step 0 has a sampling row"):
        Delivery(table).deliver(step([True]), result([1], [False]))


def test_a_request_that_ends_between_steps_says_how_it_began() -> None:
    table = SlotTable(1)
    request = seated(table, "a")
    delta = ended_early(request, "abort")
    assert (delta.finish_reason, delta.first_scheduled, delta.num_cached_tokens) == ("abort", 12.5, 4)
    request.output_token_ids.append(1)
    assert ended_early(request, "abort").first_scheduled is None
