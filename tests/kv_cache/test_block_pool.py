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


def test_a_free_block_is_found_until_it_is_handed_out_again() -> None:
    pool = BlockPool(5)
    held = pool.allocate(3)
    pool.index.put(0, [b"a", b"b"], held[:2])
    pool.free(held)
    assert pool.num_free == 4
    assert pool.num_idle(held) == 3
    pool.share(held[1:2])
    assert pool.num_free == 3
    assert pool.allocate(3).tolist() == [4, 1, 3]
    assert dict(pool.index.maps[0]) == {b"b": 2}
    with pytest.raises(RuntimeError, match="3 blocks asked, 0 of 4"):
        pool.allocate(3)
    pool.free(ids(2))
    assert pool.allocate(1).tolist() == [2]
    assert len(pool.index) == 0


def test_found_blocks_leave_the_queue_from_anywhere_and_come_back_at_its_end() -> None:
    pool = BlockPool(9)
    held = pool.allocate(8)
    pool.index.put(0, [bytes([i]) for i in range(8)], held)
    pool.free(held)
    for _ in range(20):  # many times around the ring
        pool.share(ids(3, 6))
        pool.free(ids(6, 3))
    assert pool.num_free == 8
    assert pool.allocate(8).tolist() == [1, 2, 4, 5, 7, 8, 6, 3]


def test_allocating_nothing_changes_nothing() -> None:
    pool = BlockPool(3)
    held = pool.allocate(2)
    pool.index.put(0, [b"a"], held[:1])
    pool.free(held)
    pool.share(held[:1])
    assert pool.allocate(0).tolist() == []
    assert pool.allocate(1).tolist() == [2]


class PoolMachine(RuleBasedStateMachine):
    """Random holders of random blocks against a plain list of free ones, in the order in which they became free."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.free_ids = list(range(1, 12))
        self.holders: list[list[int]] = []
        self.keys: dict[int, bytes] = {}
        self.num_keys = 0

    def holds(self, block: int) -> int:
        return sum(block in held for held in self.holders)

    @rule(n=st.integers(0, 6))
    def allocate(self, n: int) -> None:
        if n > len(self.free_ids):
            with pytest.raises(RuntimeError):
                self.pool.allocate(n)
            return
        got = self.pool.allocate(n).tolist()
        assert got == self.free_ids[:n]
        del self.free_ids[:n]
        for block in got:
            self.keys.pop(block, None)
        self.holders.append(got)

    @rule(data=st.data())
    def name(self, data: st.DataObject) -> None:
        nameless = sorted(set(range(1, 12)) - set(self.free_ids) - set(self.keys))
        if nameless:
            block = data.draw(st.sampled_from(nameless))
            self.num_keys += 1
            self.keys[block] = b"%d" % self.num_keys
            self.pool.index.put(0, [self.keys[block]], ids(block))

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        known = sorted((set(range(1, 12)) - set(self.free_ids)) | set(self.keys))
        if known:
            wanted = data.draw(st.lists(st.sampled_from(known), unique=True))
            assert self.pool.num_idle(ids(*wanted)) == len(set(wanted) & set(self.free_ids))
            self.pool.share(ids(*wanted))
            self.free_ids = [b for b in self.free_ids if b not in wanted]
            self.holders.append(wanted)

    @rule(block=st.integers(0, 11))
    def share_what_is_lost(self, block: int) -> None:
        if (block == 0 or block in self.free_ids) and block not in self.keys:
            with pytest.raises(RuntimeError, match="shared while nobody holds"):
                self.pool.share(ids(block))

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.holders:
            leaving = data.draw(st.sets(st.integers(0, len(self.holders) - 1), max_size=3))
            order = data.draw(st.permutations([b for i in sorted(leaving) for b in self.holders[i]]))
            self.holders = [held for i, held in enumerate(self.holders) if i not in leaving]
            self.pool.free(ids(*order))
            # A block that several let go is free when the last of them does.
            self.free_ids += [b for i, b in enumerate(order) if not self.holds(b) and b not in order[i + 1 :]]

    @rule(data=st.data())
    def free_twice(self, data: st.DataObject) -> None:
        if self.free_ids:
            with pytest.raises(RuntimeError, match="freed while nobody holds"):
                self.pool.free(ids(data.draw(st.sampled_from(self.free_ids))))

    @invariant()
    def conserved(self) -> None:
        assert self.pool.num_free == len(self.free_ids)
        assert self.pool.num_free + len({b for held in self.holders for b in held}) == self.pool.num_blocks == 11
        assert dict(self.pool.index.maps[0]) == {key: block for block, key in self.keys.items()}


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
