"""The pool of KV block ids that all cache groups share.

It knows ids, how many hold each, and which of those that nobody holds can still be found. It does not know requests, what
a block contains, or how keys come about.
"""

from __future__ import annotations

import numpy as np

from enginebay.errors import MemoryBudgetError
from enginebay.interfaces.scheduler import BoolArray, Int32Array
from enginebay.kv_cache.block_index import BlockIndex


class BlockPool:
    """Hands out block ids ``1 .. num_blocks - 1``; block 0 is the null block and never leaves.

    A block is held or free, and a free one whose key is known can be found and held again until it is handed out anew: the
    block freed longest ago first. Every operation is a few vectorised copies of the ids concerned, whatever the pool's
    size.

    ::

        entries  head                                 tail     a queue of ids on a ring of twice the pool's size
                  | 7 | 3 | x | 9 | x | 4 | 12 |  -  |
        x: block 5 was found and held again. Its entry stays, but ``place[5]`` does not name it any more, so
        `allocate` skips it; when the ring is full, the entries that count are moved together.

    Parameters
    ----------
    num_blocks
        Blocks of the cache tensors, the null block included.
    num_groups
        Cache groups, each of which finds its own blocks.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        if num_blocks < 2:
            raise MemoryBudgetError(
                f"the KV cache has {num_blocks} block(s); it needs the null block and at least one more. "
                "Give it more memory (cache.gpu_memory_utilization) or a smaller cache.block_size"
            )
        self.num_blocks = num_blocks - 1
        self.index = BlockIndex(num_groups, num_blocks)
        # Entries are counted through, and stand on the ring at their number modulo its length.
        self._ring = np.zeros(2 * num_blocks, dtype=np.int32)
        self._head, self._tail = 0, self.num_blocks
        self._ring[: self._tail] = np.arange(1, num_blocks, dtype=np.int32)
        #: int64 ``[num_blocks]``: number of the entry by which a block is free, -1 where it is held
        self._place = np.arange(-1, num_blocks - 1, dtype=np.int64)
        self._num_free = self.num_blocks
        self._ref_counts = np.zeros(num_blocks, dtype=np.int32)
        self._scratch = np.zeros(num_blocks, dtype=np.int32)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, those that can be found included."""
        return self._num_free

    def num_idle(self, ids: Int32Array) -> int:
        """How many of `ids` nobody holds."""
        return int(np.count_nonzero(self._ref_counts[ids] == 0))

    def allocate(self, n: int) -> Int32Array:
        """Take `n` blocks, int32 ``[n]``, each held once and not findable any more.

        The caller has compared `n` with `num_free`.
        """
        if n > self._num_free:
            raise RuntimeError(f"block pool: {n} blocks asked, {self._num_free} of {self.num_blocks} free")
        ids = self._pop(n)
        self._num_free -= n
        self._place[ids] = -1
        self._ref_counts[ids] = 1
        self.index.drop(ids)
        return ids

    def share(self, ids: Int32Array) -> None:
        """Let one more holder have each of `ids`, which are distinct, and held already or can be found."""
        lost = ids[(self._ref_counts[ids] == 0) & ~self.index.findable[ids]]
        if len(lost):
            raise RuntimeError(f"block pool: block(s) {lost.tolist()} shared while nobody holds them")
        if not self._last(ids).all():
            raise RuntimeError(f"block pool: a block shared twice in one call: {ids.tolist()}")
        idle = ids[self._ref_counts[ids] == 0]
        self._place[idle] = -1
        self._num_free -= len(idle)
        self._ref_counts[ids] += 1

    def free(self, ids: Int32Array) -> None:
        """Give each of `ids` up, once for every holder named; blocks that nobody holds any more become free, in order.

        Freeing a block more often than it is held, or the null block, is a fault of the accounting and raises
        `RuntimeError`; the pool is then unchanged.
        """
        np.subtract.at(self._ref_counts, ids, 1)
        idle = ids[self._ref_counts[ids] < 0]
        if len(idle):
            np.add.at(self._ref_counts, ids, 1)
            raise RuntimeError(f"block pool: block(s) {idle.tolist()} freed while nobody holds them")
        gone = ids[self._ref_counts[ids] == 0]
        gone = gone[self._last(gone)]
        if self._tail + len(gone) - self._head > len(self._ring):
            self._compact()
        entries = np.arange(self._tail, self._tail + len(gone))
        self._ring[entries % len(self._ring)] = gone
        self._place[gone] = entries
        self._tail += len(gone)
        self._num_free += len(gone)

    def _pop(self, n: int) -> Int32Array:
        """The first `n` entries that count; they and the dead ones between them leave the ring."""
        width = n
        while True:
            entries = np.arange(self._head, min(self._head + width, self._tail))
            ids: Int32Array = self._ring[entries % len(self._ring)]
            if self._tail - self._head == self._num_free:  # no dead ones
                self._head += n
                return ids
            alive = np.flatnonzero(self._place[ids] == entries)
            if len(alive) >= n:
                self._head += int(alive[n - 1]) + 1 if n else 0
                return ids[alive[:n]]
            width *= 2

    def _compact(self) -> None:
        """Drop dead entries. At least a pool's worth of entries has come since the last time."""
        entries = np.arange(self._head, self._tail)
        ids = self._ring[entries % len(self._ring)]
        ids = ids[self._place[ids] == entries]
        self._head, self._tail = 0, len(ids)
        self._ring[: len(ids)] = ids
        self._place[ids] = np.arange(len(ids))

    def _last(self, ids: Int32Array) -> BoolArray:
        """Where no later entry of `ids` names the same block, bool as `ids`."""
        numbers = np.arange(len(ids), dtype=np.int32)
        # Of equal ids, only the last finds its own number there.
        self._scratch[ids] = numbers
        last: BoolArray = self._scratch[ids] == numbers
        return last
