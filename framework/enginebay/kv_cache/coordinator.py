"""One pool, several cache groups: the `KVCacheManager` that schedulers use.

It knows slots and token counts. It does not know requests, and nothing here looks at a step in flight: that a freed
block is no longer named by one is the scheduler's law.
"""

from __future__ import annotations

import numpy as np

from enginebay.interfaces.scheduler import Int32Array, NewBlocks
from enginebay.kv_cache.block_pool import BlockPool
from enginebay.kv_cache.manager import GroupManager


class KVCacheCoordinator:
    """Block accounting over all cache groups; implements `enginebay.interfaces.scheduler.KVCacheManager`.

    Block ids are unique over groups: each group takes its own blocks from the one pool.

    Parameters
    ----------
    groups
        Number of cache groups.
    block_size
        Tokens a block.
    num_blocks
        Blocks of the cache tensors, the null block included: the number given to ``Worker.initialize_kv_cache``.
    max_num_seqs
        Slots.
    max_model_len
        Most tokens a slot.
    """

    def __init__(self, groups: int, block_size: int, num_blocks: int, max_num_seqs: int, max_model_len: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.managers = tuple(GroupManager(block_size, max_num_seqs, max_model_len) for _ in range(groups))
        none = np.zeros(0, dtype=np.int32)
        self._nothing = tuple(NewBlocks(none, none, none) for _ in self.managers)

    @property
    def num_blocks(self) -> int:
        """Usable blocks of the pool (the null block not counted)."""
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return self.pool.num_free

    def blocks_needed_by_row(self, slots: Int32Array, num_tokens: Int32Array) -> Int32Array:
        """New blocks, over all groups, for each of `slots` to hold `num_tokens` tokens, int32 ``[R]``."""
        total = np.zeros(len(slots), dtype=np.int32)
        for manager in self.managers:
            total += manager.needed(slots, num_tokens)
        return total

    def blocks_needed(self, slots: Int32Array, num_tokens: Int32Array) -> int:
        """New blocks, over all groups, for the requests in `slots` to hold `num_tokens` tokens each."""
        return int(self.blocks_needed_by_row(slots, num_tokens).sum())

    def allocate(self, slots: Int32Array, num_tokens: Int32Array) -> tuple[NewBlocks, ...] | None:
        """Give each slot the blocks to hold `num_tokens` tokens; None, and no change, if they are short.

        `slots` are distinct.
        """
        counts = [manager.needed(slots, num_tokens) for manager in self.managers]
        totals = [int(c.sum()) for c in counts]
        total = sum(totals)
        if total == 0:
            return self._nothing
        if total > self.pool.num_free:
            return None
        parts = np.split(self.pool.allocate(total), np.cumsum(totals)[:-1])
        return tuple(m.extend(slots, c, ids) for m, c, ids in zip(self.managers, counts, parts, strict=True))

    def free(self, slot: int) -> None:
        """Return all blocks of `slot` to the pool. Only after the last step naming them has retired."""
        for manager in self.managers:
            self.pool.free(manager.release(slot))

    def fits(self, num_tokens: int) -> bool:
        """Whether a single request of `num_tokens` tokens could ever run in an empty pool."""
        return len(self.managers) * -(-num_tokens // self.block_size) <= self.pool.num_blocks
