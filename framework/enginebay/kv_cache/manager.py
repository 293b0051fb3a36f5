"""The block tables of one cache group.

It knows which blocks each slot holds, in order of position. It does not know where blocks come from, other groups, or
requests. A sliding-window group keeps all its blocks, as a full one does.

Shapes: ``S`` slots, ``B`` columns of a block table, ``R`` rows of a call, ``N`` new blocks.
"""

from __future__ import annotations

import numpy as np

from enginebay.interfaces.scheduler import Int32Array, NewBlocks


class GroupManager:
    """Slot-keyed block tables of one cache group, on the host.

    Parameters
    ----------
    block_size
        Tokens a block.
    num_slots
        ``S``.
    max_model_len
        Most tokens that a slot will hold.
    """

    def __init__(self, block_size: int, num_slots: int, max_model_len: int) -> None:
        self.block_size = block_size
        #: int32 ``[S, B]``; row s is defined up to ``num_held[s]``
        self.block_table = np.zeros((num_slots, -(-max_model_len // block_size)), dtype=np.int32)
        #: int32 ``[S]``: blocks that each slot holds
        self.num_held = np.zeros(num_slots, dtype=np.int32)

    def needed(self, slots: Int32Array, num_tokens: Int32Array) -> Int32Array:
        """New blocks for each of `slots` to hold `num_tokens` tokens, int32 ``[R]``; 0 where it holds enough."""
        blocks = (num_tokens + (self.block_size - 1)) // self.block_size - self.num_held[slots]
        missing: Int32Array = np.maximum(blocks, 0, dtype=np.int32)
        return missing

    def extend(self, slots: Int32Array, counts: Int32Array, block_ids: Int32Array) -> NewBlocks:
        """Append `block_ids` ``[N]`` to the tables of `slots`, ``counts[r]`` of them to row r.

        ::

            slots 7 4    counts 2 1    ids a b c    held: slot 7 has 3, slot 4 has 0
            -> slots 7 7 4   columns 3 4 0   block_ids a b c
        """
        rows = np.flatnonzero(counts)
        gaining, counts = slots[rows], counts[rows]
        flat_slots = np.repeat(gaining, counts)
        # Entry i's offset within its row, then the row's first free column on top.
        ends = np.cumsum(counts, dtype=np.int32)
        columns = np.arange(len(block_ids), dtype=np.int32)
        columns += np.repeat(self.num_held[gaining] - (ends - counts), counts)
        self.block_table[flat_slots, columns] = block_ids
        self.num_held[gaining] += counts
        return NewBlocks(slots=flat_slots, columns=columns, block_ids=block_ids)

    def release(self, slot: int) -> Int32Array:
        """Empty `slot`'s table and return the ids that it held."""
        ids = self.block_table[slot, : self.num_held[slot]].copy()
        self.num_held[slot] = 0
        return ids
