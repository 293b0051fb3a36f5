"""How many leading blocks of a request are cached, in every group at once.

It knows keys, the maps that look them up, and windows. It does not know who holds a block or what becomes of a hit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from enginebay.interfaces.scheduler import Request
from enginebay.kv_cache.hashing import BlockHasher
from enginebay.kv_cache.manager import GroupManager

#: Keys are computed as far as the look-up gets, this many more each time at first, then twice as many.
_FIRST_STRIDE = 8

Map = Mapping[bytes, int]


def cached_blocks(
    hasher: BlockHasher, request: Request, limit: int, managers: Sequence[GroupManager], maps: Sequence[Map]
) -> int:
    """The most leading blocks, at most `limit`, with which the request can go on in all groups.

    A full group needs all of them, a window group those that the next tokens read. A shorter prefix of a full group's hit is
    a hit too; a window group's is not, so the window groups are asked again until none takes anything away.
    """
    found = limit
    for manager, by_key in zip(managers, maps, strict=True):
        if manager.window is None:
            found = _leading(hasher, request, found, by_key)
    windows = [pair for pair in zip(managers, maps, strict=True) if pair[0].window is not None]
    before = -1
    while windows and found not in (0, before):
        before = found
        keys = hasher.keys(request, found)
        for manager, by_key in windows:
            found = _window(keys, found, manager, by_key)
    return found


def _leading(hasher: BlockHasher, request: Request, limit: int, by_key: Map) -> int:
    """Leading blocks, at most `limit`, of which none is missing."""
    found, stride = 0, _FIRST_STRIDE
    while found < limit:
        goal = min(found + stride, limit)
        for key in hasher.keys(request, goal)[found:goal]:
            if key not in by_key:
                return found
            found += 1
        stride *= 2
    return found


def _window(keys: Sequence[bytes], limit: int, manager: GroupManager, by_key: Map) -> int:
    """The longest prefix, at most `limit` blocks, whose blocks that the tokens after it read are cached.

    Seen from the right: a run of cached blocks must reach back to where the window before its end begins.
    """
    end = column = limit
    while column > manager.first_column(end * manager.block_size):
        column -= 1
        if keys[column] not in by_key:
            end = column
    return end
