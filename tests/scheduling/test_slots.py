"""The slot table."""

from __future__ import annotations

import numpy as np
from enginebay.interfaces.scheduler import Request
from enginebay.sampling.params import SamplingParams
from enginebay.scheduling.slots import ACTIVE, FREE, STOP_WIDTH, SlotTable


def request(stops: frozenset[int] = frozenset(), outputs: tuple[int, ...] = ()) -> Request:
    made = Request("r", np.arange(5, dtype=np.int32), SamplingParams(), stops, 10, seed=0)
    made.output_token_ids.extend(outputs)
    return made


def test_seat_takes_the_counts_of_a_resumed_request() -> None:
    table, resumed = SlotTable(2), request(frozenset({7, 9}), (1, 2))
    slot = table.seat(resumed, 4)
    assert resumed.slot == slot == 0
    assert table.state[slot] == ACTIVE
    counts = (table.num_prompt, table.num_prefill, table.num_tokens, table.num_computed, table.num_computable)
    assert [int(c[slot]) for c in counts] == [5, 7, 7, 4, 14]
    assert (int(table.num_outputs[slot]), int(table.max_outputs[slot])) == (2, 10)
    assert sorted(table.stop_ids[slot].tolist()) == [-1] * (STOP_WIDTH - 2) + [7, 9]


def test_a_vacated_slot_is_free_and_keeps_nothing_of_its_request() -> None:
    table, first, second = SlotTable(1), request(frozenset({7})), request()
    slot = table.seat(first, 0)
    assert table.num_free == 0
    assert table.vacate(slot) is first
    assert table.state[slot] == FREE
    assert table.seat(second, 0) == slot
    assert (table.stop_ids[slot] == -1).all()


def test_stop_ids_that_do_not_fit_are_marked_for_look_up() -> None:
    table = SlotTable(3)
    slots = [
        table.seat(request(stops), 0)
        for stops in (frozenset({1}), frozenset(range(STOP_WIDTH + 1)), frozenset({2**40}))
    ]
    assert table.look_up_stops[slots].tolist() == [False, True, True]
    assert (table.stop_ids[slots[1:]] == -1).all()
