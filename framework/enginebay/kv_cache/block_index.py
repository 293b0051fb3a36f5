"""Which block holds what: keys to block ids, one map a cache group.

It knows keys and ids. It does not know who holds a block, or how a key comes about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from enginebay.interfaces.scheduler import BoolArray, Int32Array


class BlockIndex:
    """The findable blocks. A key names at most one block of a group, and a block has at most one key.

    Parameters
    ----------
    num_groups
        Cache groups. A block belongs to one of them as long as it is findable.
    num_blocks
        Block ids are below this.
    """

    def __init__(self, num_groups: int, num_blocks: int) -> None:
        self._maps: tuple[dict[bytes, int], ...] = tuple({} for _ in range(num_groups))
        #: bool ``[num_blocks]``: ids that have a key
        self.findable: BoolArray = np.zeros(num_blocks, dtype=np.bool_)
        self._keys: list[bytes] = [b""] * num_blocks
        self._groups: list[int] = [0] * num_blocks

    def __len__(self) -> int:
        return sum(map(len, self._maps))

    @property
    def maps(self) -> Sequence[Mapping[bytes, int]]:
        """Key -> block id, one map a group. For look-ups only."""
        return self._maps

    def put(self, group: int, keys: Sequence[bytes], ids: Int32Array) -> None:
        """Make each of `ids` findable by its key, unless another block of the group has that already."""
        named = ids[self.findable[ids]]
        if len(named):
            raise RuntimeError(f"block index: block(s) {named.tolist()} have a key already")
        by_key, keys_of, groups, put = self._maps[group], self._keys, self._groups, []
        for key, block_id in zip(keys, ids.tolist(), strict=True):
            if by_key.setdefault(key, block_id) == block_id:
                keys_of[block_id] = key
                groups[block_id] = group
                put.append(block_id)
        self.findable[put] = True

    def drop(self, ids: Int32Array) -> None:
        """Forget what `ids` hold, as far as anything was known."""
        named = ids[self.findable[ids]]
        if not len(named):
            return
        self.findable[named] = False
        maps, keys, groups = self._maps, self._keys, self._groups
        for block_id in named.tolist():
            del maps[groups[block_id]][keys[block_id]]

    def clear(self) -> None:
        """Forget everything."""
        for found in self._maps:
            found.clear()
        self.findable[:] = False
