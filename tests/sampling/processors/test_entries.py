"""Ragged entries of slots, flattened."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from enginebay.sampling.processors.entries import NO_TOKEN, SlotEntries, token_array


def test_flat_entries_name_their_rows() -> None:
    entries = SlotEntries(5, torch.device("cpu"))
    entries.put(4, (np.array([7, 8]), np.array([[1], [2]])))
    entries.put(1, (np.array([9]), np.array([[3, 4]])))
    entries.put(2, None)
    flat = entries.flat(np.array([2, 1, 4], dtype=np.int32))
    assert flat is not None
    assert flat.rows.tolist() == [1, 2]
    assert flat.row_of_entry.tolist() == [1, 2, 2]
    assert flat.place_of_entry.tolist() == [0, 1, 1]
    assert flat.columns[0].tolist() == [9, 7, 8]
    assert flat.columns[1].tolist() == [[3, 4], [NO_TOKEN, 1], [NO_TOKEN, 2]]
    assert entries.flat(np.array([2, 0], dtype=np.int32)) is None


def test_the_flat_form_is_kept_while_the_rows_are_the_same() -> None:
    entries = SlotEntries(3, torch.device("cpu"))
    entries.put(0, (np.array([5]),))
    entries.put(1, (np.array([6]),))
    slots = np.array([0, 1], dtype=np.int32)
    first = entries.flat(slots)
    assert entries.flat(slots.copy()) is first
    assert entries.flat(slots, np.array([True, True])) is first
    later = entries.flat(slots, np.array([False, True]))
    assert later is not None
    assert later.columns[0].tolist() == [6]
    entries.put(1, (np.array([7]),))
    after = entries.flat(slots)
    assert after is not None
    assert after.columns[0].tolist() == [5, 7]
    entries.put(0, (np.array([], dtype=np.int64),))
    assert entries.present.tolist() == [False, True, False]


@pytest.mark.parametrize("given", [[5, 1, 1, 9, 3], frozenset([9, 5, 3, 1])])
def test_ids_outside_the_vocabulary_are_left_out(given: list[int]) -> None:
    assert token_array(given, 6).tolist() == [1, 3, 5]
