"""One group's block tables."""

from __future__ import annotations

import numpy as np
from enginebay.kv_cache.manager import GroupManager


def ids(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def test_needed_counts_block_edges_and_never_shrinks() -> None:
    manager = GroupManager(block_size=4, num_slots=3, max_model_len=16)
    assert manager.needed(ids(0, 1, 2), ids(1, 4, 5)).tolist() == [1, 1, 2]
    manager.extend(ids(2), ids(2), ids(8, 9))
    assert manager.needed(ids(2, 2, 2), ids(3, 8, 9)).tolist() == [0, 0, 1]


def test_extend_appends_to_each_table_in_order() -> None:
    manager = GroupManager(block_size=4, num_slots=8, max_model_len=32)
    manager.extend(ids(7), ids(3), ids(1, 2, 3))
    new = manager.extend(ids(7, 5, 4), ids(2, 0, 1), ids(10, 11, 12))
    assert new.slots.tolist() == [7, 7, 4]
    assert new.columns.tolist() == [3, 4, 0]
    assert new.block_ids.tolist() == [10, 11, 12]
    assert all(a.dtype == np.int32 for a in (new.slots, new.columns, new.block_ids))
    assert manager.block_table[7, :5].tolist() == [1, 2, 3, 10, 11]
    assert manager.num_held.tolist() == [0, 0, 0, 0, 1, 0, 0, 5]


def test_release_empties_the_table_and_returns_its_blocks() -> None:
    manager = GroupManager(block_size=4, num_slots=2, max_model_len=16)
    manager.extend(ids(1), ids(2), ids(6, 3))
    assert manager.release(1).tolist() == [6, 3]
    assert manager.release(1).tolist() == []
    assert manager.needed(ids(1), ids(1)).tolist() == [1]


def test_the_last_block_of_an_odd_length_has_a_column() -> None:
    manager = GroupManager(block_size=4, num_slots=1, max_model_len=9)
    assert manager.block_table.shape == (1, 3)
