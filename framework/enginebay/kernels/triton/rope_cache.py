"""Head norms, rotation and the cache write in one pass over queries, keys and values. Twin: `enginebay.kernels.rope_cache`.

A program takes a few heads of one kind at one token: queries go back in place, keys and values to the cache alone.

Shapes: ``T`` tokens, ``H`` query heads, ``K`` KV heads, ``D`` head size, ``R`` rotated leading features, ``P`` positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from enginebay.kernels.rope_cache import Norm

#: heads a program: some thousand elements, and a few programs even for a single token; with two warps the fastest
#: of 1-4 warps and 1-32 heads on an H200
_HEADS = 8
_WARPS = 2


def rope_and_cache(
    states: Tensor,
    num_heads: int,
    positions: Tensor,
    table: Tensor | None,
    cache: Tensor,
    slot_mapping: Tensor,
    q_norm: Norm | None,
    k_norm: Norm | None,
    k_scale: float,
    v_scale: float,
) -> None:
    """See the twin; `states` may have any strides but a contiguous last axis."""
    tokens, all_heads, head_dim = states.shape
    kv_heads = (all_heads - num_heads) // 2
    rotated = 0 if table is None else table.shape[-1]
    # Arguments that a variant does not read still need a tensor.
    q_weight, q_eps = (states, 1.0) if q_norm is None else q_norm
    k_weight, k_eps = (states, 1.0) if k_norm is None else k_norm
    query_programs, kv_programs = triton.cdiv(num_heads, _HEADS), triton.cdiv(kv_heads, _HEADS)
    _rope_and_cache[(tokens, query_programs + 2 * kv_programs)](
        states,
        positions,
        states if table is None else table,
        cache,
        slot_mapping,
        q_weight,
        k_weight,
        q_eps,
        k_eps,
        k_scale,
        v_scale,
        states.stride(0),
        states.stride(1),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        cache.stride(3),
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        QUERY_PROGRAMS=query_programs,
        KV_PROGRAMS=kv_programs,
        D=head_dim,
        HALF=rotated // 2,
        HALF_PAD=triton.next_power_of_2(max(rotated // 2, 1)),
        REST_PAD=triton.next_power_of_2(max(head_dim - rotated, 1)),
        D_PAD=triton.next_power_of_2(head_dim),
        BLOCK=cache.shape[2],
        BLOCK_HEADS=_HEADS,
        NORM_Q=q_norm is not None,
        NORM_K=k_norm is not None,
        FP8=cache.dtype.itemsize == 1,
        num_warps=_WARPS,
    )


@triton.jit
def _shared_row(row, mask):
    """What `row` points to, ``[features]``, for each head of `mask`, ``[heads, features]``, in float32.

    Each thread loads what it needs of it: a row loaded once would be handed around behind barriers, which costs more.
    """
    return tl.load(tl.broadcast_to(row[None, :], mask.shape), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _normed(x, inverse, weight, mask, dtype: tl.constexpr):
    """Heads ``[heads, features]`` with their norm applied, rounded as the twin's are."""
    return (x * inverse * _shared_row(weight, mask)).to(dtype).to(tl.float32)


@triton.jit
def _store(x, target, mask, scale, FP8: tl.constexpr):
    """A tile to the cache, divided by its scale where the cache is of 8 bits."""
    if FP8:
        # beyond its range the conversion gives no number
        x = tl.minimum(tl.maximum(x / scale, -448.0), 448.0)
    tl.store(target, x.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _turn(
    source,
    target,
    is_real,
    line,
    weight,
    eps,
    scale,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST: tl.constexpr,
    REST_PAD: tl.constexpr,
    NORM: tl.constexpr,
    FP8: tl.constexpr,
):
    """The heads at `source`, pointers ``[heads]``, normalised and rotated, to those at `target`.

    ``2 * HALF`` features are rotated by the table's `line`; `REST` behind them are not.
    """
    dtype: tl.constexpr = source.dtype.element_ty
    half = tl.arange(0, HALF_PAD)
    rest = tl.arange(0, REST_PAD)
    half_mask = is_real[:, None] & (half < HALF)[None, :]
    rest_mask = is_real[:, None] & (rest < REST)[None, :]
    squares = tl.zeros([is_real.shape[0]], tl.float32)
    if HALF > 0:
        low = tl.load(source[:, None] + half[None, :], mask=half_mask, other=0.0).to(tl.float32)
        high = tl.load(source[:, None] + (half + HALF)[None, :], mask=half_mask, other=0.0).to(tl.float32)
        squares += tl.sum(low * low + high * high, 1)
    if REST > 0:
        last = tl.load(source[:, None] + (rest + 2 * HALF)[None, :], mask=rest_mask, other=0.0).to(tl.float32)
        squares += tl.sum(last * last, 1)
    inverse = tl.rsqrt(squares / D + eps)[:, None]
    if HALF > 0:
        if NORM:
            low = _normed(low, inverse, weight + half, half_mask, dtype)
            high = _normed(high, inverse, weight + half + HALF, half_mask, dtype)
        cos_low = _shared_row(line + half, half_mask)
        cos_high = _shared_row(line + half + HALF, half_mask)
        sin_low = _shared_row(line + half + 2 * HALF, half_mask)
        sin_high = _shared_row(line + half + 3 * HALF, half_mask)
        # rounded after the first product, as the twin's two operations do
        turned_low = ((low * cos_low).to(dtype).to(tl.float32) + high * sin_low).to(dtype).to(tl.float32)
        turned_high = ((high * cos_high).to(dtype).to(tl.float32) + low * sin_high).to(dtype).to(tl.float32)
        _store(turned_low, target[:, None] + half[None, :], half_mask, scale, FP8)
        _store(turned_high, target[:, None] + (half + HALF)[None, :], half_mask, scale, FP8)
    if REST > 0:
        if NORM:
            last = _normed(last, inverse, weight + rest + 2 * HALF, rest_mask, dtype)
        _store(last, target[:, None] + (rest + 2 * HALF)[None, :], rest_mask, scale, FP8)


@triton.jit
def _rope_and_cache(
    states,
    positions,
    table,
    cache,
    slot_mapping,
    q_weight,
    k_weight,
    q_eps,
    k_eps,
    k_scale,
    v_scale,
    token_stride,
    head_stride,
    cache_block_stride,
    cache_kv_stride,
    cache_token_stride,
    cache_head_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    QUERY_PROGRAMS: tl.constexpr,
    KV_PROGRAMS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    NORM_Q: tl.constexpr,
    NORM_K: tl.constexpr,
    FP8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    source = states + token * token_stride
    line = table
    if HALF > 0:
        line += tl.load(positions + token) * (4 * HALF)
    REST: tl.constexpr = D - 2 * HALF
    if program < QUERY_PROGRAMS:
        head = program * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        at = source + head * head_stride
        # what is neither normalised nor rotated stays as it is
        QUERY_REST: tl.constexpr = REST if NORM_Q else 0
        _turn(at, at, head < HEADS, line, q_weight, q_eps, 1.0, D, HALF, HALF_PAD, QUERY_REST, REST_PAD, NORM_Q, False)
    else:
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            head = (program - QUERY_PROGRAMS) % KV_PROGRAMS * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
            is_real = head < KV_HEADS
            key = source + (HEADS + head) * head_stride
            target = cache + slot // BLOCK * cache_block_stride + slot % BLOCK * cache_token_stride
            to = target + head * cache_head_stride
            if program < QUERY_PROGRAMS + KV_PROGRAMS:
                _turn(key, to, is_real, line, k_weight, k_eps, k_scale, D, HALF, HALF_PAD, REST, REST_PAD, NORM_K, FP8)
            else:
                value = key + KV_HEADS * head_stride
                _turn(value, to + cache_kv_stride, is_real, line, k_weight, 1.0, v_scale, D, 0, 1, D, D_PAD, False, FP8)
