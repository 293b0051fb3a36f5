"""Keys of blocks: chained, separated by extras, computed once."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256

import numpy as np
import pytest
from enginebay.interfaces.scheduler import Request
from enginebay.kv_cache.hashing import BlockHasher, root_key
from hypothesis import given
from hypothesis import strategies as st

MakeRequest = Callable[..., Request]
texts = st.text(max_size=3)
extras = st.lists(st.tuples(texts, texts), max_size=3).map(tuple)


def test_c31_a_key_is_sha256_of_its_parent_and_its_tokens_as_little_endian_int32(make_request: MakeRequest) -> None:
    request = make_request([1, 2, 3, 400, 5], outputs=[2**31 - 1, 7, 8])
    first = sha256(root_key(()) + np.array([1, 2, 3, 400], dtype="<i4").tobytes()).digest()
    second = sha256(first + np.array([5, 2**31 - 1, 7, 8], dtype="<i4").tobytes()).digest()
    assert BlockHasher(4).keys(request, 2) == [first, second]


def test_keys_are_computed_as_far_as_asked_and_kept(make_request: MakeRequest) -> None:
    hasher, request = BlockHasher(2), make_request(range(8))
    first = list(hasher.keys(request, 1))
    assert len(request.block_keys) == 1
    assert hasher.keys(request, 3)[:1] == first
    assert hasher.keys(request, 2) is request.block_keys
    assert len(request.block_keys) == 3


@given(
    tokens=st.lists(st.integers(0, 2**31 - 1), max_size=24),
    num_prompt=st.integers(0, 24),
    stops=st.lists(st.integers(0, 8), max_size=5),
)
def test_however_the_tokens_become_known_the_keys_are_the_same(
    make_request: MakeRequest, tokens: list[int], num_prompt: int, stops: list[int]
) -> None:
    hasher, blocks = BlockHasher(3), len(tokens) // 3
    whole, grown = make_request(tokens), make_request(tokens[:num_prompt], outputs=tokens[num_prompt:])
    for stop in stops:
        hasher.keys(grown, min(stop, blocks))
    assert hasher.keys(grown, blocks) == hasher.keys(whole, blocks)
    assert len(set(whole.block_keys)) == blocks


@given(one=extras, other=extras)
def test_c26_c27_different_extras_give_different_roots(
    one: tuple[tuple[str, str], ...], other: tuple[tuple[str, str], ...]
) -> None:
    assert (root_key(one) == root_key(other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((("salt", "a"),), (("adapter", "a"),)),
        ((("ab", "c"),), (("a", "bc"),)),
        ((("a", "b"), ("c", "d")), (("a", "b\x00c"), ("", "d"))),
        ((("a", ""),), (("", "a"),)),
        ((), (("", ""),)),
    ],
)
def test_c27_tags_and_values_do_not_run_into_each_other(
    one: tuple[tuple[str, str], ...], other: tuple[tuple[str, str], ...]
) -> None:
    assert root_key(one) != root_key(other)


def test_a_key_of_unknown_tokens_is_refused(make_request: MakeRequest) -> None:
    with pytest.raises(RuntimeError, match="2 blocks of request r asked, 7 tokens known"):
        BlockHasher(4).keys(make_request(range(7)), 2)
