"""Grouping: which rows of a step are padded to one another and computed together.

Host arithmetic on lengths, vectorised over rows. It knows neither heads nor caches, only lengths and a bound on keys.

Shapes: ``R`` rows of the phase, ``N`` rows of a group, ``Q`` queries a row (padded), ``S`` keys a row (padded).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from enginebay.kernels.transfer import to_device
from torch import Tensor

Ints = npt.NDArray[np.int64]

#: What gathering one key costs in units of one query-key product, measured on CPU at 3 KV heads of 64.
_KEY_COST = 8
#: Keys of a row that cost less than what comes with a row.
_SHORT = 64
#: Accepted ratio of padded to real cost before rows are split by length.
_PADDING = 1.5


@dataclass(frozen=True, slots=True)
class Tokens:
    """Where the queries of a group of unequal or reordered rows lie among the phase's tokens."""

    #: int64 ``[N * Q]``: token of each padded query; padding repeats the row's last token
    padded: Tensor
    #: int64 ``[n]``: real queries among the padded ones
    real: Tensor
    #: int64 ``[n]``: token of each real query
    target: Tensor


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows computed together."""

    #: consecutive rows, or int64 ``[N]`` row numbers on the device
    rows: slice | Tensor
    num_rows: int
    #: ``Q``
    query_len: int
    #: ``S``: host upper bound of keys that a row's queries see
    key_len: int
    #: host upper bound of keys before a row's first query
    context_len: int
    #: consecutive tokens, `query_len` a row, or where each query lies
    tokens: slice | Tokens

    @property
    def uncached(self) -> bool:
        """Whether no row has keys from earlier steps."""
        return self.context_len == 0

    def blocks(self, query_block: int) -> Iterator[tuple[int, int, int]]:
        """Ranges of at most `query_block` queries, as ``(first, last + 1, keys that they may see)``."""
        for first in range(0, self.query_len, query_block):
            stop = min(first + query_block, self.query_len)
            yield first, stop, min(self.key_len, self.context_len + stop)


def row_cost(query_lens: Ints, key_lens: Ints) -> Ints:
    """Cost of each row in query-key products, gathering included."""
    return key_lens * (query_lens + _KEY_COST)


def fixed_groups(num_rows: int, key_len: int, max_keys: int) -> list[RowGroup]:
    """Groups of a captured decode step: consecutive rows, each padded to `key_len` keys."""
    step = max(1, max_keys // key_len)
    starts = range(0, num_rows, step)
    spans = [slice(a, min(a + step, num_rows)) for a in starts]
    return [RowGroup(s, s.stop - s.start, 1, key_len, key_len - 1, s) for s in spans]


def group_rows(
    query_lens: Ints, key_lens: Ints, *, max_keys: int, slack: int, split_uncached: bool, device: torch.device
) -> list[RowGroup]:
    """Group a step's rows: all together in their order if little is padded, else by classes of similar length.

    Parameters
    ----------
    query_lens, key_lens
        ``[R]``: exact queries, and an upper bound of the keys that they see.
    max_keys
        Most padded keys of a group of more than one row.
    slack
        Accepted padding in units of `row_cost`.
    split_uncached
        Keep rows without cached keys apart from the others.
    """
    starts = np.concatenate(([0], np.cumsum(query_lens)))
    context_lens = key_lens - query_lens
    uncached = context_lens == 0
    num_rows, query_len, key_len = len(query_lens), int(query_lens.max()), int(key_lens.max())
    padded = num_rows * key_len * (query_len + _KEY_COST)
    mixed = split_uncached and bool(uncached.any()) and not bool(uncached.all())
    if not mixed and padded <= _PADDING * int(row_cost(query_lens, key_lens).sum()) + slack:
        classes = [np.arange(num_rows)]
    else:
        # Two classes an octave; short rows are not worth telling apart.
        names = np.ceil(2 * np.log2(query_lens + _KEY_COST)) * 4096 + np.ceil(2 * np.log2(key_lens + _SHORT))
        if split_uncached:
            names += uncached * 4096.0 * 4096.0
        classes = [np.flatnonzero(names == name) for name in np.unique(names)]
    groups = []
    for members in classes:
        step = max(1, max_keys // int(key_lens[members].max()))
        for a in range(0, len(members), step):
            rows = members[a : a + step]
            query_len, key_len = int(query_lens[rows].max()), int(key_lens[rows].max())
            context_len = int(context_lens[rows].max())
            on_device: slice | Tensor
            tokens: slice | Tokens
            if len(rows) == rows[-1] - rows[0] + 1:
                on_device = slice(int(rows[0]), int(rows[-1]) + 1)
            else:
                on_device = to_device(rows, device)
            if isinstance(on_device, slice) and int(query_lens[rows].min()) == query_len:
                tokens = slice(int(starts[rows[0]]), int(starts[rows[-1] + 1]))
            else:
                tokens = _tokens(starts[rows], query_lens[rows], query_len, device)
            groups.append(RowGroup(on_device, len(rows), query_len, key_len, context_len, tokens))
    return groups


def _tokens(starts: Ints, query_lens: Ints, query_len: int, device: torch.device) -> Tokens:
    steps = np.arange(query_len)
    padded = (starts[:, None] + np.minimum(steps, query_lens[:, None] - 1)).ravel()
    real = np.flatnonzero((steps < query_lens[:, None]).ravel())
    return Tokens(*(to_device(x, device) for x in (padded, real, padded[real])))
