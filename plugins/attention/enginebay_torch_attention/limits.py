"""Bounds on memory and on padding. Plain numbers: nothing here knows a tensor or a batch."""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one pass over a group of rows may take. A single row, or a single query, may exceed a byte limit alone."""

    #: gathered keys and values, in bytes
    kv_bytes: int
    #: one block of scores and probabilities, in bytes
    score_bytes: int
    #: indices and masks kept from `plan` for all layers, in bytes; what is beyond is recomputed by each layer
    plan_bytes: int
    #: most queries of a row in a block of scores: small blocks skip more keys of the future and stay in the CPU's cache
    query_block: int
    #: padding that costs less than another group of rows, in units of `grouping.row_cost`
    slack: int


#: Keys and scores stay within the third level cache.
CPU_LIMITS = Limits(kv_bytes=16 * _MIB, score_bytes=8 * _MIB, plan_bytes=64 * _MIB, query_block=32, slack=16_000)
#: A launch costs as much as a great deal of padding.
CUDA_LIMITS = Limits(
    kv_bytes=256 * _MIB, score_bytes=256 * _MIB, plan_bytes=256 * _MIB, query_block=1024, slack=4_000_000
)


def limits_for(device_type: str) -> Limits:
    """The limits of a device type, ``"cpu"`` or any accelerator's."""
    return CPU_LIMITS if device_type == "cpu" else CUDA_LIMITS
