"""How a decode step's rows are split into work items of about equal length, decided on the device.

A row of ``n`` tokens to read becomes ``ceil(n / split)`` items, where ``split`` is the same for all rows: the step's tokens
over the items wanted, rounded up to whole tiles. Since rounding adds at most one item a row, a step never has more than
``rows + items wanted`` items, whatever its lengths; a launch of that many programs, known before any length is, serves
every step. The idea is that of a persistent split-KV schedule (FlashDecoding; FlashInfer's planner, which runs on the
host).

Shapes: ``R`` rows, ``I`` items at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Buffers that a plan is written to; their addresses never change. All int32."""

    #: ``[I]``: each item's row, the first position that it reads, and the first that it no longer does
    row: Tensor
    begin: Tensor
    end: Tensor
    #: ``[R]``: each row's first item and its number of items
    first_item: Tensor
    num_items: Tensor
    #: ``[1]``: items of the step; those beyond are stale
    total: Tensor

    @classmethod
    def empty(cls, max_rows: int, wanted: int, device: torch.device) -> SplitPlan:
        """Room for steps of up to `max_rows` rows."""

        def buffer(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        items = max_items(max_rows, wanted)
        return cls(buffer(items), buffer(items), buffer(items), buffer(max_rows), buffer(max_rows), buffer(1))

    @property
    def nbytes(self) -> int:
        """Device memory in bytes."""
        return sum(t.nbytes for t in (self.row, self.begin, self.end, self.first_item, self.num_items, self.total))


def max_items(rows: int, wanted: int) -> int:
    """Items that a step of `rows` rows has at most."""
    return rows + wanted


def plan_splits(
    seq_lens: Tensor, plan: SplitPlan, *, wanted: int, window: int | None, tile: int, min_split: int
) -> None:
    """Write the plan of a decode step; one launch, no host read.

    Parameters
    ----------
    seq_lens
        int32 ``[R]`` on the device.
    plan
        Where it goes.
    wanted
        Items that would fill the GPU.
    window
        Tokens that a query sees; only these are read.
    tile, min_split
        A split is a multiple of `tile` and at least `min_split` tokens.
    """
    rows = seq_lens.shape[0]
    _plan_splits[(1,)](
        seq_lens,
        plan.row,
        plan.begin,
        plan.end,
        plan.first_item,
        plan.num_items,
        plan.total,
        rows,
        wanted,
        window or 0,
        min_split,
        TILE=tile,
        ROWS=triton.next_power_of_2(plan.first_item.shape[0]),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["rows"])
def _plan_splits(
    seq_lens,
    item_row,
    item_begin,
    item_end,
    first_item,
    num_items,
    total,
    rows,
    wanted,
    window,
    min_split,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    real = row < rows
    length = tl.load(seq_lens + row, mask=real, other=0)
    start = tl.zeros_like(length)
    if window > 0:
        start = tl.maximum(length - window, 0)
    tokens = length - start
    split = tl.maximum(tl.cdiv(tl.sum(tokens.to(tl.int64), 0), wanted), min_split).to(tl.int32)
    split = tl.cdiv(split, TILE) * TILE
    count = tl.where(real, tl.cdiv(tokens, split), 0)
    first = tl.cumsum(count, 0) - count
    tl.store(first_item + row, first, mask=real)
    tl.store(num_items + row, count, mask=real)
    tl.store(total, tl.sum(count, 0))
    for i in range(tl.max(count, 0)):
        mine = i < count
        begin = start + i * split
        tl.store(item_row + first + i, row, mask=mine)
        tl.store(item_begin + first + i, begin, mask=mine)
        tl.store(item_end + first + i, tl.minimum(begin + split, length), mask=mine)
