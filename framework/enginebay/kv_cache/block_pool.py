"""The pool of KV block ids that all cache groups share.

It knows ids and how many hold each. It does not know requests, cache groups, or what a block contains.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from enginebay.errors import MemoryBudgetError

Int32Array = npt.NDArray[np.int32]


class BlockPool:
    """Hands out block ids ``1 .. num_blocks - 1``; block 0 is the null block and never leaves.

    Free ids wait in a ring, so that the block freed longest ago is reused first: the order in which a prefix cache
    wants to lose its blocks. Every operation is a few vectorised copies of the ids concerned, whatever the pool's size.

    Parameters
    ----------
    num_blocks
        Blocks of the cache tensors, the null block included.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise MemoryBudgetError(
                f"the KV cache has {num_blocks} block(s); it needs the null block and at least one more. "
                "Give it more memory (cache.gpu_memory_utilization) or a smaller cache.block_size"
            )
        self._ring = np.arange(1, num_blocks, dtype=np.int32)
        self._head = 0
        self._num_free = num_blocks - 1
        self._ref_counts = np.zeros(num_blocks, dtype=np.int32)

    @property
    def num_blocks(self) -> int:
        """Blocks that could be handed out, the null block not counted."""
        return len(self._ring)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return self._num_free

    def allocate(self, n: int) -> Int32Array:
        """Take `n` blocks, int32 ``[n]``, each held once. The caller has compared `n` with `num_free`."""
        if n > self._num_free:
            raise RuntimeError(f"block pool: {n} blocks asked, {self._num_free} of {self.num_blocks} free")
        ids: Int32Array = self._ring.take(self._positions(self._head, n))
        self._head = (self._head + n) % len(self._ring)
        self._num_free -= n
        self._ref_counts[ids] = 1
        return ids

    def share(self, ids: Int32Array) -> None:
        """Let one more holder have each of `ids`, which are held already."""
        self._require_held(ids, "shared")
        self._ref_counts[ids] += 1

    def free(self, ids: Int32Array) -> None:
        """Give `ids` up once each; blocks that nobody holds any more become free, in the order given.

        Freeing a block that is free, or the null block, is a fault of the accounting and raises `RuntimeError`; the
        pool is then unchanged.
        """
        self._require_held(ids, "freed")
        self._ref_counts[ids] -= 1
        gone = ids[self._ref_counts[ids] == 0]
        self._ring[self._positions(self._head + self._num_free, len(gone))] = gone
        self._num_free += len(gone)

    def _positions(self, start: int, n: int) -> npt.NDArray[np.intp]:
        """Ring positions of `n` entries from `start` on, wrapped."""
        return np.arange(start, start + n) % len(self._ring)

    def _require_held(self, ids: Int32Array, verb: str) -> None:
        """Refuse ids that are not held, and ids given twice in one call."""
        idle = ids[self._ref_counts[ids] < 1]
        if len(idle):
            raise RuntimeError(f"block pool: block(s) {idle.tolist()} {verb} while nobody holds them")
        if len(np.unique(ids)) != len(ids):
            raise RuntimeError(f"block pool: a block {verb} twice in one call: {ids.tolist()}")
