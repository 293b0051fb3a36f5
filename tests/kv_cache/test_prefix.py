"""The longest prefix cached in all groups, against trying every length."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from enginebay.interfaces.scheduler import Request
from enginebay.kv_cache.hashing import BlockHasher
from enginebay.kv_cache.manager import GroupManager
from enginebay.kv_cache.prefix import cached_blocks
from hypothesis import given
from hypothesis import strategies as st

MakeRequest = Callable[..., Request]
BLOCK = 4


def manager(window: int | None) -> GroupManager:
    return GroupManager(BLOCK, num_slots=1, max_model_len=200, window=window, max_tokens_in_flight=8)


def reads(window: int | None, end: int) -> set[int]:
    """Blocks below `end` that a query at the first position after them, or later, sees."""
    position = end * BLOCK
    first = 0 if window is None else position - window + 1
    return {p // BLOCK for p in range(max(first, 0), position)}


@given(
    limit=st.integers(0, 40),
    groups=st.lists(
        st.tuples(st.none() | st.integers(1, 30), st.sets(st.integers(0, 39), max_size=8)), min_size=1, max_size=4
    ),
)
def test_no_longer_prefix_satisfies_all_groups(
    make_request: MakeRequest, limit: int, groups: list[tuple[int | None, set[int]]]
) -> None:
    hasher = BlockHasher(BLOCK)
    keys = list(hasher.keys(make_request(range(160)), 40))
    maps = [{key: i for i, key in enumerate(keys) if i not in lost} for _, lost in groups]
    found = cached_blocks(hasher, make_request(range(160)), limit, [manager(w) for w, _ in groups], maps)
    assert found == max(n for n in range(limit + 1) if not any(reads(w, n) & lost for w, lost in groups))


def test_a_miss_at_the_start_computes_few_keys(make_request: MakeRequest) -> None:
    request = make_request(range(160))
    assert cached_blocks(BlockHasher(BLOCK), request, 39, [manager(None)], [{}]) == 0
    assert len(request.block_keys) == 8


@pytest.mark.parametrize(("window", "found"), [(1, 8), (2, 4), (5, 4), (6, 0), (9, 0)])
def test_a_window_group_needs_only_what_the_next_tokens_read(
    make_request: MakeRequest, window: int, found: int
) -> None:
    hasher = BlockHasher(BLOCK)
    keys = hasher.keys(make_request(range(32)), 8)
    by_key = {keys[3]: 1}
    assert cached_blocks(hasher, make_request(range(33)), 8, [manager(window)], [by_key]) == found
