"""A family: the requests that the engine runs for one of the user's, one a completion (``n``).

The first completion leads: it arrives first, so the engine computes its prompt, and the others find the prompt's blocks in the
cache. It knows requests; it does not know how blocks are found, or how outputs are put together.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

from enginebay.interfaces.scheduler import Request
from enginebay.kv_cache.coordinator import FAMILY_TAG

_FAMILIES = itertools.count()
_NUM_SEEDS = 2**64


def draw_seed() -> int:
    """A seed for a request that was given none (C34)."""
    return int.from_bytes(os.urandom(8), "little")


def family(request: Request, *, prefix_caching: bool) -> tuple[Request, ...]:
    """All requests of `request`, which becomes the leader.

    Parameters
    ----------
    request
        Checked, with the user's parameters.
    prefix_caching
        Whether everybody's blocks can be found; if not, a tag of their own lets the family find its prompt's.
    """
    params = request.params
    if params.n == 1:
        return (request,)
    if not prefix_caching:
        request.cache_extras += ((FAMILY_TAG, str(next(_FAMILIES))),)
    # The leader scores the prompt for all: scoring means computing it, whatever the cache holds (C28).
    rest = params if params.prompt_logprobs is None else replace(params, prompt_logprobs=None)
    siblings = (
        replace(
            request,
            request_id=f"{request.request_id}-{i}",
            params=rest,
            seed=draw_seed() if params.seed is None else (params.seed + i) % _NUM_SEEDS,
            block_keys=[],
            output_token_ids=[],
        )
        for i in range(1, params.n)
    )
    return (request, *siblings)
