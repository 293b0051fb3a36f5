"""Reading a paged cache: from block tables to rows of a flat view, whatever the layout, and the masks to go with them.

Every key that a group gathers is one that its row really has: positions past a row's end repeat its last token, so that
what lies in unused or not yet written places, even NaN, never enters a product. Padding is then masked in the scores.

Shapes: ``N`` rows, ``Q`` queries a row, ``S`` keys a row, ``K`` KV heads, ``D`` head size. Keys are numbered from
the first that a row's first query sees: the row's start, or with a window later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from enginebay.interfaces.batch import PhaseBatch
from enginebay.plugins.records import CANONICAL_AXES, KVLayout
from torch import Tensor

from enginebay_torch_attention.grouping import RowGroup

#: Strides in elements of a cache tensor's canonical axes: blocks, kv, block, kv_heads, head_dim.
Strides = tuple[int, ...]


def layout_strides(layout: KVLayout, block_size: int, num_kv_heads: int, head_dim: int) -> Strides:
    """Strides of a contiguous cache in `layout`, which has blocks as its slowest axis."""
    sizes = {"kv": 2, "block": block_size, "kv_heads": num_kv_heads, "head_dim": head_dim}
    strides, step = {}, 1
    for axis in reversed(layout.axes):
        strides[axis] = step
        step *= sizes.get(axis, 1)
    return tuple(strides[axis] for axis in CANONICAL_AXES)


def row_unit(strides: Strides) -> int:
    """Elements from one row of `flat_rows` to the next, such that every head of every key and value begins a row."""
    return math.gcd(*strides[:4])


def flat_rows(cache: Tensor) -> Tensor:
    """A cache ``[blocks, 2, block, K, D]`` as ``[rows, D]`` over the same memory; rows may overlap."""
    size, strides = cache.shape, cache.stride()
    last = sum((size[i] - 1) * strides[i] for i in range(4))
    unit = row_unit(strides)
    return cache.as_strided((last // unit + 1, size[4]), (unit, 1))


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Queries `first` to `stop` of each row, which see at most the first `num_keys` gathered keys."""

    first: int
    stop: int
    num_keys: int
    #: float32 ``[N, 1, 1, stop - first, num_keys]``: 0 where a query sees a key, else -inf
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is equal for all layers of a group."""

    #: int32 ``[2 * N * K * S]``: row of `flat_rows` of each head's each key, then of each value
    index: Tensor
    #: kept, or made one after another while they are iterated
    blocks: Iterable[QueryBlock]

    def keep(self) -> Prepared:
        """With all blocks made."""
        return Prepared(self.index, tuple(self.blocks))

    def copy_(self, other: Prepared) -> None:
        """Take over `other`'s values in place."""
        self.index.copy_(other.index)
        for mine, theirs in zip(self.blocks, other.blocks, strict=True):
            mine.mask.copy_(theirs.mask)


@dataclass(frozen=True, slots=True)
class Pager:
    """Makes `Prepared` for one plan group; device work only, so that it may run inside a captured graph."""

    group: int
    block_size: int
    num_kv_heads: int
    window: int | None

    def prepare(self, batch: PhaseBatch, rows: RowGroup, strides: Strides, query_block: int) -> Prepared:
        """Index of `rows`, and blocks of `query_block` queries (0: none), whose masks are made as they are iterated."""
        seq_lens = _select(batch.seq_lens, rows.rows).long()
        first_query = seq_lens - self._query_lens(batch, rows)
        steps = torch.arange(rows.key_len, device=seq_lens.device)
        if self.window is None:
            positions = steps.expand(rows.num_rows, -1)
        else:
            positions = (first_query - (self.window - 1)).clamp_(min=0)[:, None] + steps
        index = self._index(batch, rows, torch.minimum(positions, seq_lens[:, None] - 1), strides)
        blocks = self._blocks(rows.blocks(query_block), positions, first_query, seq_lens) if query_block else ()
        return Prepared(index, blocks)

    def _blocks(
        self, ranges: Iterable[tuple[int, int, int]], positions: Tensor, first_query: Tensor, seq_lens: Tensor
    ) -> Iterator[QueryBlock]:
        """Blocks with their masks. Queries past a row's end repeat its last, so that each sees a key."""
        last = seq_lens[:, None] - 1
        for a, b, s in ranges:
            steps = torch.arange(a, b, device=last.device)
            queries = torch.minimum(first_query[:, None] + steps, last)[:, :, None]
            keys = positions[:, None, :s]
            hidden = keys > queries
            if self.window is not None:
                hidden |= keys <= queries - self.window
            mask = torch.zeros(hidden.shape, device=last.device).masked_fill_(hidden, -torch.inf)
            yield QueryBlock(a, b, s, mask[:, None, None])

    def _query_lens(self, batch: PhaseBatch, rows: RowGroup) -> Tensor | int:
        if rows.query_len == 1:
            return 1
        return _select(batch.query_start_loc[1:], rows.rows) - _select(batch.query_start_loc[:-1], rows.rows)

    def _index(self, batch: PhaseBatch, rows: RowGroup, positions: Tensor, strides: Strides) -> Tensor:
        """Rows of the flat view that hold the keys and values of the tokens at `positions`, ``[N, S]``."""
        block, kv, token, head = (stride // row_unit(strides) for stride in strides[:4])
        table = _select(batch.groups[self.group].block_table, rows.rows)
        blocks = table.gather(1, positions // self.block_size).long()
        index = blocks * block + (positions % self.block_size) * token
        heads = torch.arange(self.num_kv_heads, device=index.device) * head
        keys = (index[:, None] + heads[:, None]).to(torch.int32)
        return torch.stack((keys, keys + kv)).view(-1)


def _select(tensor: Tensor, rows: slice | Tensor) -> Tensor:
    """``tensor[rows]``; a slice is a view."""
    return tensor[rows]
