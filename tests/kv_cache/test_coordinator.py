"""Several groups over one pool: all or nothing, nothing twice, everything comes back."""

from __future__ import annotations

import numpy as np
from enginebay.interfaces.scheduler import Int32Array, KVCacheManager
from enginebay.kv_cache.coordinator import KVCacheCoordinator
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule


def ids(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


def make(groups: int = 2, num_blocks: int = 11) -> KVCacheCoordinator:
    return KVCacheCoordinator(groups=groups, block_size=4, num_blocks=num_blocks, max_num_seqs=4, max_model_len=20)


def test_implements_the_protocol_and_leaves_the_null_block_out() -> None:
    kv: KVCacheManager = make()
    assert kv.num_blocks == kv.num_free_blocks == 10


def test_each_group_gets_its_own_blocks() -> None:
    kv = make()
    new = kv.allocate(ids(0, 2), ids(5, 4))
    assert new is not None
    assert [n.slots.tolist() for n in new] == [[0, 0, 2]] * 2
    assert [n.columns.tolist() for n in new] == [[0, 1, 0]] * 2
    assert sorted(np.concatenate([n.block_ids for n in new]).tolist()) == [1, 2, 3, 4, 5, 6]
    assert kv.num_free_blocks == 4


def test_short_blocks_change_nothing() -> None:
    kv = make()
    kv.allocate(ids(0), ids(12))
    assert kv.blocks_needed(ids(0, 1), ids(13, 8)) == 6
    assert kv.blocks_needed_by_row(ids(0, 1), ids(13, 8)).tolist() == [2, 4]
    assert kv.allocate(ids(0, 1), ids(13, 8)) is None
    assert kv.num_free_blocks == 4
    assert kv.blocks_needed(ids(0, 1), ids(13, 8)) == 6


def test_within_a_block_nothing_is_gained() -> None:
    kv = make()
    kv.allocate(ids(3), ids(5))
    free = kv.num_free_blocks
    new = kv.allocate(ids(3), ids(8))
    assert new is not None
    assert [len(n.block_ids) for n in new] == [0, 0]
    assert kv.num_free_blocks == free


def test_fits_compares_with_the_empty_pool_over_all_groups() -> None:
    kv = make()
    kv.allocate(ids(0), ids(20))
    assert kv.num_free_blocks == 0
    assert kv.fits(20)
    assert not kv.fits(21)
    assert make(groups=1).fits(40)


class CoordinatorMachine(RuleBasedStateMachine):
    """Random growth and release of slots against sets of ids."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = make(groups=2, num_blocks=18)
        self.tables: dict[int, list[list[int]]] = {s: [[], []] for s in range(4)}

    def wanted(self, slot: int, tokens: int) -> int:
        return sum(max(0, -(-tokens // 4) - len(table)) for table in self.tables[slot])

    @rule(tokens=st.dictionaries(st.integers(0, 3), st.integers(0, 20), min_size=1))
    def allocate(self, tokens: dict[int, int]) -> None:
        slots, counts = ids(*tokens), ids(*tokens.values())
        want = [self.wanted(*item) for item in tokens.items()]
        free = self.kv.num_free_blocks
        assert self.kv.blocks_needed_by_row(slots, counts).tolist() == want
        new = self.kv.allocate(slots, counts)
        assert (new is None) == (sum(want) > free)
        if new is None:
            assert self.kv.num_free_blocks == free
            return
        for group, gained in enumerate(new):
            for slot, column, block in zip(gained.slots, gained.columns, gained.block_ids, strict=True):
                assert column == len(self.tables[int(slot)][group])
                self.tables[int(slot)][group].append(int(block))
        assert all(self.wanted(*item) == 0 for item in tokens.items())

    @rule(slot=st.integers(0, 3))
    def free(self, slot: int) -> None:
        self.kv.free(slot)
        self.tables[slot] = [[], []]

    @invariant()
    def conserved_and_disjoint(self) -> None:
        held = [b for tables in self.tables.values() for table in tables for b in table]
        assert len(set(held)) == len(held)
        assert 0 not in held
        assert self.kv.num_free_blocks + len(held) == self.kv.num_blocks == 17


TestCoordinatorMachine = CoordinatorMachine.TestCase
TestCoordinatorMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
