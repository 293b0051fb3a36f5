"""The block pool: conservation, no block twice, the null block never."""

from __future__ import annotations

import numpy as np
import pytest
from enginebay.errors import MemoryBudgetError
from enginebay.kv_cache.block_pool import BlockPool
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule


def ids(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def test_hands_out_every_block_but_the_null_block() -> None:
    pool = BlockPool(5)
    assert pool.num_blocks == pool.num_free == 4
    got = pool.allocate(4)
    assert got.dtype == np.int32
    assert sorted(got.tolist()) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_longest_freed_is_reused_first() -> None:
    pool = BlockPool(5)
    pool.allocate(4)
    pool.free(ids(3, 1))
    pool.free(ids(4))
    assert pool.allocate(2).tolist() == [3, 1]
    assert pool.allocate(1).tolist() == [4]


def test_asking_for_more_than_is_free_changes_nothing() -> None:
    pool = BlockPool(3)
    with pytest.raises(RuntimeError, match="3 blocks asked, 2 of 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2


@pytest.mark.parametrize("again", [ids(2), ids(0), ids(1, 1), ids(1, 2)])
def test_double_free_raises_and_changes_nothing(again: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    pool.free(ids(2))
    with pytest.raises(RuntimeError, match="freed"):
        pool.free(again)
    assert pool.num_free == 1
    pool.free(ids(1, 3))
    assert sorted(pool.allocate(3).tolist()) == [1, 2, 3]


def test_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(4)
    held = pool.allocate(2)
    pool.share(held[:1])
    pool.free(held)
    assert pool.num_free == 2
    pool.free(held[:1])
    assert pool.num_free == 3
    with pytest.raises(RuntimeError, match="shared while nobody holds"):
        pool.share(held[:1])


@pytest.mark.parametrize("n", [0, 1])
def test_a_pool_without_a_usable_block_is_refused(n: int) -> None:
    with pytest.raises(MemoryBudgetError, match=f"{n} block"):
        BlockPool(n)


class PoolMachine(RuleBasedStateMachine):
    """Random holders of random blocks against plain sets."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.holders: list[set[int]] = []

    @rule(n=st.integers(0, 6))
    def allocate(self, n: int) -> None:
        free = self.pool.num_free
        if n > free:
            with pytest.raises(RuntimeError):
                self.pool.allocate(n)
            return
        got = self.pool.allocate(n).tolist()
        assert len(set(got)) == n
        assert 0 not in got
        assert not set(got) & set().union(*self.holders)
        self.holders.append(set(got))

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.holders:
            held = data.draw(st.sampled_from(self.holders))
            self.pool.share(ids(*held))
            self.holders.append(set(held))

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.holders:
            held = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
            self.pool.free(ids(*held))

    @invariant()
    def conserved(self) -> None:
        assert self.pool.num_free + len(set().union(*self.holders)) == self.pool.num_blocks == 11


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
