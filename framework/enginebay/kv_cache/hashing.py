"""Keys of full blocks: a SHA-256 chain over everything that a block's contents depend on.

It knows requests' tokens and extras. It does not know blocks, groups, or what is cached.

::

    root = SHA-256(domain | extras)    key_0 = SHA-256(root | tokens of block 0)    key_1 = SHA-256(key_0 | tokens of block 1)

A key stands for all tokens up to its block's end, so equal keys mean equal prefixes under equal extras. Nobody can find or
guess a key without knowing all of that (C31).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from hashlib import sha256

import numpy as np

from enginebay.interfaces.scheduler import Request

_DOMAIN = b"enginebay kv block, version 1"
_TOKEN_BYTES = 4


def root_key(extras: Iterable[tuple[str, str]]) -> bytes:
    """The parent of a request's first block.

    Every part is preceded by its length, so that no two different lists of extras give the same bytes (C26, C27).
    """
    parts = [_DOMAIN]
    for tag, value in extras:
        parts += (tag.encode("utf-8", "surrogatepass"), value.encode("utf-8", "surrogatepass"))
    return sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


class BlockHasher:
    """Computes the keys of requests' full blocks, each once: they stay in ``request.block_keys``.

    Parameters
    ----------
    block_size
        Tokens a block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._pack = struct.Struct(f"<{block_size}i").pack

    def keys(self, request: Request, num_blocks: int) -> list[bytes]:
        """``request.block_keys``, long enough for the first `num_blocks` blocks. Their tokens must be known."""
        keys = request.block_keys
        have = len(keys)
        if have >= num_blocks:
            return keys
        start, end = have * self.block_size, num_blocks * self.block_size
        if end > request.num_tokens:
            raise RuntimeError(
                f"block keys: {num_blocks} blocks of request {request.request_id} asked, {request.num_tokens} tokens known"
            )
        parent = keys[-1] if keys else root_key(request.cache_extras)
        num_prompt = len(request.prompt_token_ids)
        if num_blocks == have + 1 and start >= num_prompt:  # a decoding request's next block
            tokens = self._pack(*request.output_token_ids[start - num_prompt : end - num_prompt])
            keys.append(sha256(parent + tokens).digest())
            return keys
        data = memoryview(_token_bytes(request, start, end))
        size = self.block_size * _TOKEN_BYTES
        for at in range(0, len(data), size):
            parent = sha256(parent + data[at : at + size]).digest()
            keys.append(parent)
        return keys


def _token_bytes(request: Request, start: int, end: int) -> bytes:
    """Known tokens ``start .. end - 1`` as little-endian int32."""
    prompt, num_prompt = request.prompt_token_ids, request.num_prompt_tokens
    outputs = request.output_token_ids[max(start - num_prompt, 0) : max(end - num_prompt, 0)]
    return prompt[start:end].astype("<i4").tobytes() + np.array(outputs, dtype="<i4").tobytes()
