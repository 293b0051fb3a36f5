"""One group's block tables."""

from __future__ import annotations

import numpy as np
from enginebay.kv_cache.manager import GroupManager


def ids(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def test_needed_counts_block_edges_and_never_shrinks() -> None:
    manager = GroupManager(block_size=4, num_slots=3, max_model_len=16, window=None, max_tokens_in_flight=0)
    assert manager.missing(ids(0, 1, 2), ids(1, 4, 5)).tolist() == [1, 1, 2]
    manager.extend(ids(2), ids(2), ids(8, 9))
    assert manager.missing(ids(2, 2, 2), ids(3, 8, 9)).tolist() == [0, 0, 1]


def test_extend_appends_to_each_table_in_order() -> None:
    manager = GroupManager(block_size=4, num_slots=8, max_model_len=32, window=None, max_tokens_in_flight=0)
    manager.extend(ids(7), ids(3), ids(1, 2, 3))
    new = manager.extend(ids(7, 5, 4), ids(2, 0, 1), ids(10, 11, 12))
    assert new.slots.tolist() == [7, 7, 4]
    assert new.columns.tolist() == [3, 4, 0]
    assert new.block_ids.tolist() == [10, 11, 12]
    assert all(a.dtype == np.int32 for a in (new.slots, new.columns, new.block_ids))
    assert manager.block_table[7, :5].tolist() == [1, 2, 3, 10, 11]
    assert manager.end.tolist() == [0, 0, 0, 0, 1, 0, 0, 5]


def test_release_empties_the_table_and_returns_its_blocks() -> None:
    manager = GroupManager(block_size=4, num_slots=2, max_model_len=16, window=None, max_tokens_in_flight=0)
    manager.extend(ids(1), ids(2), ids(6, 3))
    assert [a.tolist() for a in manager.release(1)] == [[0, 1], [6, 3]]
    assert [a.tolist() for a in manager.release(1)] == [[], []]
    assert manager.missing(ids(1), ids(1)).tolist() == [1]


def test_the_last_block_of_an_odd_length_has_a_column() -> None:
    manager = GroupManager(block_size=4, num_slots=1, max_model_len=9, window=None, max_tokens_in_flight=0)
    assert manager.block_table.shape == (1, 3)


def test_a_window_groups_blocks_leave_as_soon_as_no_query_reads_them() -> None:
    manager = GroupManager(block_size=4, num_slots=3, max_model_len=40, window=6, max_tokens_in_flight=8)
    manager.extend(ids(0, 2), ids(5, 3), ids(11, 12, 13, 14, 15, 21, 22, 23))
    # A query at 8 reads 3..8, one at 9 reads 4..9.
    assert manager.retire(ids(0, 2), ids(8, 8)).tolist() == []
    assert manager.retire(ids(0, 2), ids(9, 8)).tolist() == [11]
    assert manager.retire(ids(2, 0), ids(12, 20)).tolist() == [21, 12, 13]
    assert manager.first.tolist() == [3, 0, 1]
    columns, held = manager.release(0)
    assert (columns.tolist(), held.tolist()) == ([3, 4], [14, 15])
    assert manager.first.tolist() == [0, 0, 1]


def test_a_group_without_a_window_keeps_its_blocks() -> None:
    manager = GroupManager(block_size=4, num_slots=1, max_model_len=40, window=None, max_tokens_in_flight=8)
    manager.extend(ids(0), ids(3), ids(1, 2, 3))
    assert manager.retire(ids(0), ids(12)).tolist() == []
    assert manager.first_column(12) == 0


def test_retiring_an_empty_slot_takes_nothing() -> None:
    manager = GroupManager(block_size=4, num_slots=1, max_model_len=40, window=2, max_tokens_in_flight=8)
    assert manager.retire(ids(0), ids(30)).tolist() == []
    assert manager.first.tolist() == [0]


def test_a_window_group_counts_what_it_holds_at_once() -> None:
    manager = GroupManager(block_size=4, num_slots=2, max_model_len=400, window=6, max_tokens_in_flight=8)
    # 5 tokens of the window and 8 in flight, laid across as many blocks as they can be.
    assert manager.most == 5
    manager.extend(ids(1), ids(3), ids(1, 2, 3))
    assert manager.missing(ids(0, 1), ids(400, 400)).tolist() == [100, 97]
    assert manager.needed(ids(0, 1), ids(400, 400)).tolist() == [5, 2]
    assert manager.needed(ids(0, 1), ids(8, 8)).tolist() == [2, 0]
    assert manager.needed_on(400, first=1, end=3) == 3
    assert manager.needed_on(13, first=1, end=3) == 1
    assert manager.needed_on(8, first=1, end=3) == 0


def test_an_adopted_prefix_begins_where_the_window_does() -> None:
    manager = GroupManager(block_size=4, num_slots=2, max_model_len=40, window=6, max_tokens_in_flight=8)
    new = manager.adopt(1, 2, ids(8, 9))
    assert (new.slots.tolist(), new.columns.tolist(), new.block_ids.tolist()) == ([1, 1], [2, 3], [8, 9])
    assert manager.missing(ids(1), ids(17)).tolist() == [1]
    assert manager.extend(ids(1), ids(1), ids(7)).columns.tolist() == [4]
    assert [a.tolist() for a in manager.release(1)] == [[2, 3, 4], [8, 9, 7]]
