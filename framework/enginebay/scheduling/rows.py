"""The rows of a step in the making: what running requests want, cut to the budget.

It knows the slot table's counters and the quota that it is handed. It does not know requests, policies or the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from enginebay.interfaces.scheduler import BoolArray, Int32Array, NewBlocks
from enginebay.scheduling.slots import SlotTable


@dataclass(slots=True)
class Rows:
    """Rows ordered decode | extend | prefill, and what is left of the quota."""

    slots: Int32Array
    #: tokens of each row
    take: Int32Array
    num_decode: int
    #: prompt tokens that the step may still take
    quota: int

    def keep(self, kept: BoolArray) -> Rows:
        """The rows where `kept` is true; the others' budget is not passed on."""
        return Rows(self.slots[kept], self.take[kept], int(kept[: self.num_decode].sum()), self.quota)

    def append(self, slots: list[int], take: list[int]) -> None:
        """Add prefill rows behind the others; their tokens have left the quota already."""
        self.slots = np.concatenate([self.slots, np.array(slots, dtype=np.int32)])
        self.take = np.concatenate([self.take, np.array(take, dtype=np.int32)])


def compose(table: SlotTable, order: Int32Array, budget: int, quota_of: Callable[[int], int]) -> Rows:
    """Decode rows first, so that none lacks budget because of a prompt; then prompt chunks.

    Parameters
    ----------
    table
        Counters of the slots.
    order
        Running slots in order of admission, which is kept within each kind of row.
    budget
        Most tokens of the step.
    quota_of
        Number of decode rows -> most prompt tokens beside them.
    """
    computed = table.num_computed[order]
    want = np.minimum(table.num_tokens[order], table.num_computable[order]) - computed
    decoding = computed >= table.num_prefill[order]
    decode = order[decoding & (want > 0)][:budget]
    quota = quota_of(len(decode))
    take = np.ones(len(decode), dtype=np.int32)
    if decoding.all():
        return Rows(decode, take, len(decode), quota)
    prompts, rest = order[~decoding], want[~decoding]
    # Each prompt gets what those before it left of the quota.
    share = np.clip(quota - (np.cumsum(rest) - rest), 0, rest).astype(np.int32)
    granted = share > 0
    return Rows(
        slots=np.concatenate([decode, prompts[granted]]),
        take=np.concatenate([take, share[granted]]),
        num_decode=len(decode),
        quota=quota - int(share.sum()),
    )


def joined(parts: list[tuple[NewBlocks, ...]]) -> tuple[NewBlocks, ...]:
    """Each group's new blocks from several allocations, in order."""
    return tuple(first.joined(*later) for first, *later in zip(*parts, strict=True))
