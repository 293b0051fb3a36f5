"""How an engine is set up for a simulation, and what is asked of it: sizes and loads, all of them small numbers.

It knows no scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arrangement:
    """Sizes of a simulated engine."""

    #: one entry a cache group: tokens that a query sees, itself included; None: all before it
    windows: tuple[int | None, ...] = (None,)
    prefix_caching: bool = False
    #: tokens a block
    block_size: int = 4
    #: blocks of the pool, the null block not counted
    usable_blocks: int = 64
    max_num_seqs: int = 4
    #: ``max_num_batched_tokens``
    budget: int = 16
    max_model_len: int = 64
    chunked_prefill: bool = True
    max_prefill_tokens: int | None = None
    #: ``max_concurrent_batches``
    concurrent: int = 1


@dataclass(frozen=True)
class Load:
    """A request to be made."""

    prompt: tuple[int, ...]
    outputs: int
    stops: tuple[int, ...] = ()
    priority: int = 0
    #: requests of different salts share no blocks
    salt: str = ""
