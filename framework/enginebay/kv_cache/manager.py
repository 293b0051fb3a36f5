"""The block tables of one cache group.

It knows which blocks each slot holds, in order of position. It does not know where blocks come from, other groups, or
requests.

Shapes: ``S`` slots, ``B`` columns of a block table, ``R`` rows of a call, ``N`` blocks of a call.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from enginebay.interfaces.scheduler import Int32Array, NewBlocks

_NO_LIMIT: Final = 2**31 - 1


class GroupManager:
    """Slot-keyed block tables of one cache group, on the host.

    ::

        columns   0 . . first . . . end          window group: first moves up as tokens leave the window
                  | gone |  held  | to come      full group:   first stays 0

    Parameters
    ----------
    block_size
        Tokens a block.
    num_slots
        ``S``.
    max_model_len
        Most tokens that a slot will hold.
    window
        Tokens that a query sees, itself included; None: all before it.
    max_tokens_in_flight
        Most tokens by which a slot's blocks reach beyond those that `retire` has heard of.
    """

    def __init__(
        self, block_size: int, num_slots: int, max_model_len: int, window: int | None, max_tokens_in_flight: int
    ) -> None:
        self.block_size = block_size
        self.window = window
        #: int32 ``[S, B]``; row s is defined from ``first[s]`` up to ``end[s]``
        self.block_table = np.zeros((num_slots, -(-max_model_len // block_size)), dtype=np.int32)
        #: int32 ``[S]``: first column that each slot holds
        self.first = np.zeros(num_slots, dtype=np.int32)
        #: int32 ``[S]``: column after the last that each slot holds
        self.end = np.zeros(num_slots, dtype=np.int32)
        #: most blocks that a slot holds at once: the window and what is in flight, anyhow they lie on the blocks
        self.most = _NO_LIMIT if window is None else -(-(window - 1 + max_tokens_in_flight) // block_size) + 1

    def first_column(self, num_tokens: int) -> int:
        """The first column that a query at position `num_tokens` or later reads."""
        return 0 if self.window is None else max(num_tokens - (self.window - 1), 0) // self.block_size

    def missing(self, slots: Int32Array, num_tokens: Int32Array) -> Int32Array:
        """Columns that each of `slots` lacks to reach `num_tokens` tokens, int32 ``[R]``; 0 where it reaches them."""
        blocks = (num_tokens + (self.block_size - 1)) // self.block_size - self.end[slots]
        lacking: Int32Array = np.maximum(blocks, 0, dtype=np.int32)
        return lacking

    def needed(self, slots: Int32Array, num_tokens: Int32Array) -> Int32Array:
        """Blocks that each of `slots` will take at once on its way to `num_tokens` tokens, int32 ``[R]``.

        In a window group some come back meanwhile, so it is less than what is missing where the way is long.
        """
        missing = self.missing(slots, num_tokens)
        if self.window is None:
            return missing
        room = self.most - (self.end[slots] - self.first[slots])
        limited: Int32Array = np.minimum(missing, np.maximum(room, 0))
        return limited

    def needed_on(self, num_tokens: int, first: int, end: int) -> int:
        """`needed` of a slot that holds the columns ``first .. end - 1``."""
        return max(min(-(-num_tokens // self.block_size) - end, self.most - (end - first)), 0)

    def adopt(self, slot: int, first: int, block_ids: Int32Array) -> NewBlocks:
        """Let the empty `slot` hold `block_ids` ``[N]`` from column `first` on."""
        end = first + len(block_ids)
        self.block_table[slot, first:end] = block_ids
        self.first[slot], self.end[slot] = first, end
        return NewBlocks(
            slots=np.full(len(block_ids), slot, dtype=np.int32),
            columns=np.arange(first, end, dtype=np.int32),
            block_ids=block_ids,
        )

    def extend(self, slots: Int32Array, counts: Int32Array, block_ids: Int32Array) -> NewBlocks:
        """Append `block_ids` ``[N]`` to the tables of `slots`, ``counts[r]`` of them to row r.

        ::

            slots 7 4    counts 2 1    ids a b c    end: slot 7 has 3, slot 4 has 0
            -> slots 7 7 4   columns 3 4 0   block_ids a b c
        """
        rows = np.flatnonzero(counts)
        gaining, counts = slots[rows], counts[rows]
        flat_slots, columns = _spread(gaining, self.end[gaining], counts)
        self.block_table[flat_slots, columns] = block_ids
        self.end[gaining] += counts
        return NewBlocks(slots=flat_slots, columns=columns, block_ids=block_ids)

    def blocks(self, slots: Int32Array, start: Int32Array, counts: Int32Array) -> Int32Array:
        """Ids of ``counts[r]`` columns from ``start[r]`` on, row after row, int32 ``[N]``. The slots hold them."""
        ids: Int32Array = self.block_table[_spread(slots, start, counts)]
        return ids

    def retire(self, slots: Int32Array, num_computed: Int32Array) -> Int32Array:
        """Take out the blocks that no query at position ``num_computed[r]`` or later reads, and return them, ``[N]``."""
        if self.window is None:
            return np.zeros(0, dtype=np.int32)
        first = self.first[slots]
        goal = np.minimum((num_computed - (self.window - 1)) // self.block_size, self.end[slots])
        rows = np.flatnonzero(goal > first)
        if not len(rows):
            return np.zeros(0, dtype=np.int32)
        losing, counts = slots[rows], (goal - first)[rows]
        ids = self.blocks(losing, first[rows], counts)
        self.first[losing] = goal[rows]
        return ids

    def release(self, slot: int) -> tuple[Int32Array, Int32Array]:
        """Empty `slot`'s table; returns the columns and ids that it held, ``[N]`` each."""
        columns = np.arange(self.first[slot], self.end[slot], dtype=np.int32)
        ids = self.block_table[slot, columns]
        self.first[slot] = self.end[slot] = 0
        return columns, ids


def _spread(slots: Int32Array, start: Int32Array, counts: Int32Array) -> tuple[Int32Array, Int32Array]:
    """Slots and columns of ``counts[r]`` columns from ``start[r]`` on, row after row, ``[N]`` each."""
    if (counts == 1).all():
        return slots, start
    # Entry i's offset within its row, then the row's start on top.
    ends = np.cumsum(counts, dtype=np.int32)
    columns = np.arange(ends[-1] if len(ends) else 0, dtype=np.int32)
    columns += np.repeat(start - (ends - counts), counts)
    return np.repeat(slots, counts), columns
