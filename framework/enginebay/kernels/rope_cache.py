"""Head norms, rotation of queries and keys, and the cache write: one pass where a fused kernel serves.

Shapes: ``T`` tokens, ``H`` query heads, ``K`` KV heads, ``D`` head size, ``P`` positions.
"""

from __future__ import annotations

from torch import Tensor

from enginebay.kernels import triton
from enginebay.kernels.cpu import ops
from enginebay.kernels.kv_write import reshape_and_cache
from enginebay.kernels.norm import rms_norm
from enginebay.kernels.rope import apply_rope_

#: weight ``[D]`` and epsilon of an RMS norm over the head size
Norm = tuple[Tensor, float]


def rope_and_cache(
    states: Tensor,
    num_heads: int,
    positions: Tensor,
    table: Tensor | None,
    cache: Tensor,
    slot_mapping: Tensor,
    *,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Normalise and rotate queries in place, and keys and values on their way to their slots.

    Parameters
    ----------
    states
        ``[T, H + 2K, D]``: queries, keys, values; heads contiguous, any stride between tokens. Undefined after
        the call but for the queries.
    num_heads
        ``H``.
    positions
        int64 ``[T]``.
    table
        ``[P, 2, rotated]`` as `rope.apply_rope_` takes it; None rotates nothing.
    cache
        ``[blocks, 2, block, K, D]``, any strides; on CUDA the fused kernel writes those whose heads are contiguous.
    slot_mapping
        int64 ``[T]``, -1 for a token that is not to be written (see `kv_write.reshape_and_cache`).
    q_norm, k_norm
        Applied before rotation, as `norm.rms_norm`.
    k_scale, v_scale
        What keys and values are divided by on their way into an fp8 cache.
    """
    if states.stride(2) == cache.stride(4) == 1 and triton.usable(states):
        from enginebay.kernels.triton import rope_cache

        rope_cache.rope_and_cache(
            states, num_heads, positions, table, cache, slot_mapping, q_norm, k_norm, k_scale, v_scale
        )
        return
    kv_heads = (states.shape[1] - num_heads) // 2
    for heads, norm in (
        (states[:, :num_heads], q_norm),
        (states[:, num_heads : num_heads + kv_heads], k_norm),
    ):
        if norm is not None:
            heads.copy_(rms_norm(heads, *norm))
    heads_contiguous = states.stride(1) == states.shape[2]
    if heads_contiguous and ops.usable(states, cache, states if table is None else table):
        ops.rope_and_cache(states, num_heads, positions, table, cache, slot_mapping)
        return
    if table is not None:
        apply_rope_(states[:, : num_heads + kv_heads], positions, table)
    key_value = states[:, num_heads:].view(-1, 2, kv_heads, states.shape[2])
    reshape_and_cache(key_value, cache, slot_mapping, k_scale, v_scale)
