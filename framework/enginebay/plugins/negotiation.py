"""What the attention backends of a run must agree on: KV layout, block size, KV dtype.

All backends that read one cache see the same memory, so a choice for one phase or layer group binds the others. Which
backends are chosen is decided elsewhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from enginebay.errors import ResolutionError
from enginebay.plugins.records import AttentionRecord, KVLayout
from enginebay.plugins.requirements import AttentionSpec

#: a layout is its axes: two plugins may call the same one by different names
Axes = tuple[str, str, str, str, str]

#: tokens; smaller blocks cost more in tables than they save in memory
LEAST_BLOCK = 16


@dataclass(frozen=True)
class CacheUser:
    """A backend that reads the cache, and what for."""

    record: AttentionRecord
    #: the layers that it serves
    specs: Sequence[AttentionSpec]
    #: the part of the engine that it fills, for messages: ``attention.sliding.decode``
    part: str = "attention"


def negotiate_layout(users: Sequence[CacheUser], block_size: int | None = None) -> tuple[KVLayout, int]:
    """The layout and the block size, in tokens, that every backend takes for every spec it serves.

    Parameters
    ----------
    users
        At least one.
    block_size
        Fixed by the user, or None: the smallest of at least 16 tokens that all kernels can take.
    """
    return _common_layout(users), common_block_size([user.record for user in users], block_size)


def common_block_size(records: Sequence[AttentionRecord], block_size: int | None = None) -> int:
    """A block size, in tokens, that is a multiple of one kernel block of every backend."""
    if block_size is not None:
        if wrong := [r for r in records if all(block_size % k for k in r.kernel_blocks)]:
            raise ResolutionError(
                f"cache.block_size {block_size} does not fit every attention backend:\n{_blocks(wrong)}\n"
                "Set cache.block_size to auto, or to a multiple of one kernel block of each."
            )
        return block_size
    choices = itertools.product(*dict.fromkeys(r.kernel_blocks for r in records))
    steps = (math.lcm(*blocks) for blocks in choices)
    return min(-(-LEAST_BLOCK // step) * step for step in steps)


def common_kv_dtype(records: Iterable[AttentionRecord], wanted: str) -> str:
    """`wanted`, if every backend can read a KV cache of that dtype."""
    records = list(records)
    if all(wanted in r.kv_dtypes for r in records):
        return wanted
    common = [d for d in records[0].kv_dtypes if all(d in r.kv_dtypes for r in records)]
    raise ResolutionError(
        f"cache.dtype {wanted} does not fit every attention backend:\n"
        + "\n".join(f"  {r.name}: {', '.join(r.kv_dtypes)}" for r in records)
        + (
            f"\nSet cache.dtype to {' or '.join(common)}."
            if common
            else "\nThey have none in common: name another backend."
        )
    )


def _common_layout(users: Sequence[CacheUser]) -> KVLayout:
    wishes = [(user, _ranks(layouts)) for user in users for layouts in _layouts(user)]
    common = set.intersection(*(set(ranks) for _, ranks in wishes))
    if not common:
        raise ResolutionError(
            "the attention backends read one KV cache, but have no KV layout in common:\n"
            + "\n".join(dict.fromkeys(f"  {u.part}: {u.record.name}: {_names(u, ranks)}" for u, ranks in wishes))
            + "".join(f"\n{a} cannot share with {b}" for a, b in _strangers(wishes))
        )
    # least sum of ranks; the first backend's preference breaks a tie
    best = min(common, key=lambda axes: (sum(ranks[axes] for _, ranks in wishes), wishes[0][1][axes]))
    return next(layout for user in users for layouts in _layouts(user) for layout in layouts if layout.axes == best)


def _layouts(user: CacheUser) -> list[tuple[KVLayout, ...]]:
    """By layer spec, the layouts that a user takes."""
    return [user.record.kv_layouts(spec) for spec in user.specs] or [user.record.layouts]


def _strangers(wishes: Sequence[tuple[CacheUser, dict[Axes, int]]]) -> list[tuple[str, str]]:
    """Pairs of users that have no layout in common."""
    pairs = itertools.combinations(wishes, 2)
    return list(
        dict.fromkeys(
            (f"{a.part} ({a.record.name})", f"{b.part} ({b.record.name})")
            for (a, x), (b, y) in pairs
            if not x.keys() & y
        )
    )


def _ranks(layouts: Iterable[KVLayout]) -> dict[Axes, int]:
    """Axes -> place among the preferences, most wanted first."""
    ranks: dict[Axes, int] = {}
    for rank, layout in enumerate(layouts):
        ranks.setdefault(layout.axes, rank)
    return ranks


def _names(user: CacheUser, ranks: Iterable[Axes]) -> str:
    names = {layout.axes: layout.name for layouts in [*_layouts(user), user.record.layouts] for layout in layouts}
    return ", ".join(names[axes] for axes in ranks) or "none"


def _blocks(records: Iterable[AttentionRecord]) -> str:
    return "\n".join(f"  {r.name}: multiples of {' or of '.join(map(str, r.kernel_blocks))}" for r in records)
