"""A few combinations in which every pair of feature values occurs that occurs in any. It knows no feature."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np


def covering(rows: Sequence[Sequence[Hashable]]) -> list[int]:
    """Indices of few rows in which every pair of values occurs that occurs in any row; greedy, the first row of equals wins.

    Parameters
    ----------
    rows
        Combinations: a value for each of at least two features, all of one length.
    """
    if not rows:
        return []
    codes = np.stack([_codes(column) for column in zip(*rows, strict=True)], axis=1)
    sizes = codes.max(axis=0) + 1
    pairs, start = [], 0
    for a, b in itertools.combinations(range(codes.shape[1]), 2):
        pairs.append(start + codes[:, a] * sizes[b] + codes[:, b])
        start += int(sizes[a] * sizes[b])
    pair_ids = np.stack(pairs, axis=1).astype(np.int32)
    wanted = np.zeros(start, dtype=np.int8)
    wanted[pair_ids] = 1
    chosen = []
    while wanted.any():
        best = int(wanted[pair_ids].sum(axis=1, dtype=np.int32).argmax())
        chosen.append(best)
        wanted[pair_ids[best]] = 0
    return chosen


def _codes(column: Sequence[Hashable]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Each value's number in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in column], dtype=np.int64)
