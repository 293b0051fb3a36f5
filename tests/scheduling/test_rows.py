"""Rows of a step in the making."""

from __future__ import annotations

import numpy as np
from enginebay.interfaces.scheduler import Int32Array, NewBlocks, Request
from enginebay.sampling.params import SamplingParams
from enginebay.scheduling.rows import Rows, compose, joined
from enginebay.scheduling.slots import SlotTable


def ids(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


def table(*computed: int) -> SlotTable:
    """Slots 0, 1, … with prompts of 10 tokens, this much of each computed, and a placeholder past the prompt."""
    made = SlotTable(len(computed))
    for count in computed:
        request = Request("r", np.zeros(10, np.int32), SamplingParams(), frozenset(), 5, seed=0)
        slot = made.seat(request, 0)
        made.num_computed[slot] = count
        made.num_tokens[slot] = max(10, count + 1)
    return made


def test_decode_rows_then_chunks_each_by_admission() -> None:
    rows = compose(table(4, 10, 7, 12, 3), ids(2, 3, 0, 1, 4), 12, lambda decoding: 12 - decoding)
    assert rows.slots.tolist() == [3, 1, 2, 0, 4]
    assert rows.take.tolist() == [1, 1, 3, 6, 1]
    assert (rows.num_decode, rows.quota) == (2, 0)


def test_the_quota_that_is_left_is_told() -> None:
    rows = compose(table(4, 10), ids(0, 1), 20, lambda decoding: 9)
    assert rows.take.tolist() == [1, 6]
    assert rows.quota == 3


def test_a_request_whose_last_output_is_in_flight_has_no_row() -> None:
    rows = compose(table(13, 14), ids(0, 1), 20, lambda decoding: 0)
    assert rows.slots.tolist() == [0]


def test_decode_rows_beyond_the_budget_wait_in_order() -> None:
    rows = compose(table(10, 10, 10), ids(2, 0, 1), 2, lambda decoding: 2 - decoding)
    assert rows.slots.tolist() == [2, 0]


def test_keep_counts_the_decode_rows_that_stay() -> None:
    rows = Rows(ids(5, 6, 7), ids(1, 1, 4), num_decode=2, quota=3).keep(np.array([False, True, True]))
    assert (rows.slots.tolist(), rows.take.tolist(), rows.num_decode, rows.quota) == ([6, 7], [1, 4], 1, 3)
    rows.append([2], [8])
    assert (rows.slots.tolist(), rows.take.tolist(), rows.num_decode) == ([6, 7, 2], [1, 4, 8], 1)
    assert rows.slots.dtype == rows.take.dtype == np.int32


def test_joined_keeps_groups_apart() -> None:
    first = (NewBlocks(ids(1), ids(0), ids(10)), NewBlocks(ids(1), ids(0), ids(20)))
    second = (NewBlocks(ids(2), ids(3), ids(11)), NewBlocks(ids(), ids(), ids()))
    blocks = joined([first, second])
    assert [b.block_ids.tolist() for b in blocks] == [[10, 11], [20]]
    assert blocks[0].columns.tolist() == [0, 3]
