"""Keys to blocks: one block a key and group, one key a block."""

from __future__ import annotations

import numpy as np
import pytest
from enginebay.interfaces.scheduler import Int32Array
from enginebay.kv_cache.block_index import BlockIndex


def ids(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


def test_groups_find_their_own_blocks() -> None:
    index = BlockIndex(num_groups=2, num_blocks=8)
    index.put(0, [b"a", b"b"], ids(3, 4))
    index.put(1, [b"a"], ids(5))
    assert [dict(m) for m in index.maps] == [{b"a": 3, b"b": 4}, {b"a": 5}]
    assert np.flatnonzero(index.findable).tolist() == [3, 4, 5]
    assert len(index) == 3


def test_the_first_block_of_a_key_keeps_it() -> None:
    index = BlockIndex(num_groups=1, num_blocks=8)
    index.put(0, [b"a"], ids(3))
    index.put(0, [b"a", b"b"], ids(6, 7))
    assert dict(index.maps[0]) == {b"a": 3, b"b": 7}
    index.drop(ids(6))
    assert index.maps[0][b"a"] == 3


def test_dropped_blocks_and_unknown_ones_are_not_found() -> None:
    index = BlockIndex(num_groups=2, num_blocks=8)
    index.put(0, [b"a"], ids(1))
    index.put(1, [b"a"], ids(2))
    index.drop(ids(2, 5))
    assert [dict(m) for m in index.maps] == [{b"a": 1}, {}]
    index.put(1, [b"c"], ids(2))
    assert dict(index.maps[1]) == {b"c": 2}
    index.clear()
    assert len(index) == 0
    assert not index.findable.any()


def test_a_second_key_for_a_block_is_a_fault() -> None:
    index = BlockIndex(num_groups=1, num_blocks=8)
    index.put(0, [b"a"], ids(1))
    with pytest.raises(RuntimeError, match=r"\[1\] have a key already"):
        index.put(0, [b"b"], ids(1))
