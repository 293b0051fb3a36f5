"""A covering choice: every pair that occurs, in few combinations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from enginebay.conformance.covering import covering
from hypothesis import given
from hypothesis import strategies as st


def pairs_in(rows: Sequence[Sequence[Any]]) -> set[tuple[int, Any, int, Any]]:
    columns = itertools.combinations(range(len(rows[0])), 2)
    return {(a, row[a], b, row[b]) for a, b in columns for row in rows}


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 4), min_size=1, max_size=200))
def test_a_covering_choice_holds_every_pair_that_occurs(rows: list[tuple[int, ...]]) -> None:
    chosen = covering(rows)
    assert pairs_in([rows[i] for i in chosen]) == pairs_in(rows)
    assert len(set(chosen)) == len(chosen)


def test_a_covering_choice_is_small() -> None:
    """At least the product of the two longest features is needed; four of four values can be had in twice that."""
    rows = list(itertools.product(range(4), repeat=4))
    assert 16 <= len(covering(rows)) <= 32
    assert covering([]) == []
