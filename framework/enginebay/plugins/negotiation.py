"""What the attention backends of a run must agree on: KV layout, block size, KV dtype.

All backends that read one cache see the same memory, so a choice for one phase binds the others. Which backends are
chosen is decided elsewhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from enginebay.errors import ResolutionError
from enginebay.plugins.records import AttentionRecord, KVLayout
from enginebay.plugins.requirements import AttentionSpec

#: a backend and the layer specs that it serves
RecordWithSpecs = tuple[AttentionRecord, Sequence[AttentionSpec]]

#: a layout is its axes: two plugins may call the same one by different names
Axes = tuple[str, str, str, str, str]

#: tokens; smaller blocks cost more in tables than they save in memory
LEAST_BLOCK = 16


def negotiate_layout(
    records_with_specs: Sequence[RecordWithSpecs], block_size: int | None = None
) -> tuple[KVLayout, int]:
    """The layout and the block size, in tokens, that every backend takes for every spec it serves.

    Parameters
    ----------
    records_with_specs
        At least one backend.
    block_size
        Fixed by the user, or None: the smallest of at least 16 tokens that all kernels can take.
    """
    return _common_layout(records_with_specs), common_block_size([r for r, _ in records_with_specs], block_size)


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


def _common_layout(records_with_specs: Sequence[RecordWithSpecs]) -> KVLayout:
    wishes = [
        (record, _ranks(layouts))
        for record, specs in records_with_specs
        for layouts in ([record.kv_layouts(spec) for spec in specs] or [record.layouts])
    ]
    common = set.intersection(*(set(ranks) for _, ranks in wishes))
    if not common:
        raise ResolutionError(
            "the attention backends have no KV layout in common:\n"
            + "\n".join(dict.fromkeys(f"  {r.name}: {_names(r, ranks)}" for r, ranks in wishes))
            + "\nName one backend for all phases, or backends that share a layout, in attention.backend."
        )
    # least sum of ranks; the first backend's preference breaks a tie
    best = min(common, key=lambda axes: (sum(ranks[axes] for _, ranks in wishes), wishes[0][1][axes]))
    return next(layout for layout in _layouts(records_with_specs) if layout.axes == best)


def _ranks(layouts: Iterable[KVLayout]) -> dict[Axes, int]:
    """Axes -> place among the preferences, most wanted first."""
    ranks: dict[Axes, int] = {}
    for rank, layout in enumerate(layouts):
        ranks.setdefault(layout.axes, rank)
    return ranks


def _layouts(records_with_specs: Sequence[RecordWithSpecs]) -> Iterable[KVLayout]:
    for record, specs in records_with_specs:
        for spec in specs:
            yield from record.kv_layouts(spec)
        yield from record.layouts


def _names(record: AttentionRecord, ranks: Iterable[Axes]) -> str:
    names = {layout.axes: layout.name for layout in record.layouts}
    return ", ".join(names.get(axes, " ".join(axes)) for axes in ranks) or "none"


def _blocks(records: Iterable[AttentionRecord]) -> str:
    return "\n".join(f"  {r.name}: multiples of {' or of '.join(map(str, r.kernel_blocks))}" for r in records)
