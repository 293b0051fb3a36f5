"""Head norms, rotation and the cache write in one pass over queries, keys and values. Twin: `enginebay.kernels.rope_cache`.

Shapes: ``T`` tokens, ``H`` query heads, ``K`` KV heads, ``D`` head size, ``R`` rotated leading features, ``P`` positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from enginebay.kernels.rope_cache import Norm

#: heads a program: some thousand elements, and a few programs even for a single token
_HEADS = 8


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
    rotated = 0 if table is None else table.shape[-1]
    rest = head_dim - rotated
    # Arguments that a variant does not read still need a tensor.
    q_weight, q_eps = (states, 1.0) if q_norm is None else q_norm
    k_weight, k_eps = (states, 1.0) if k_norm is None else k_norm
    _rope_and_cache[(tokens, triton.cdiv(all_heads, _HEADS))](
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
        KV_HEADS=(all_heads - num_heads) // 2,
        D=head_dim,
        HALF=rotated // 2,
        HALF_PAD=triton.next_power_of_2(rotated // 2) if rotated else 1,
        REST=rest,
        REST_PAD=triton.next_power_of_2(rest) if rest else 1,
        BLOCK=cache.shape[2],
        BLOCK_HEADS=_HEADS,
        NORM_Q=q_norm is not None,
        NORM_K=k_norm is not None,
        FP8=cache.dtype.itemsize == 1,
        num_warps=2,
    )


@triton.jit
def _gain(q_weight, k_weight, feature, inside, is_query, is_key, NORM_Q: tl.constexpr, NORM_K: tl.constexpr):
    """The heads' norm weights, float32 ``[heads, features]``; 1 for heads without a norm."""
    gain = tl.full([is_query.shape[0], feature.shape[0]], 1.0, tl.float32)
    if NORM_Q:
        weight = tl.load(q_weight + feature, mask=inside, other=0.0).to(tl.float32)
        gain = tl.where(is_query[:, None], weight[None, :], gain)
    if NORM_K:
        weight = tl.load(k_weight + feature, mask=inside, other=0.0).to(tl.float32)
        gain = tl.where(is_key[:, None], weight[None, :], gain)
    return gain


@triton.jit
def _write(x, state, target, mask, is_stored, scale, FP8: tl.constexpr, IN_PLACE: tl.constexpr, is_changed):
    """A tile back in place where it was changed, and to the cache where it is stored."""
    if IN_PLACE:
        tl.store(state, x.to(state.dtype.element_ty), mask=mask & is_changed[:, None])
    if FP8:
        # beyond its range the conversion gives no number
        kept = tl.minimum(tl.maximum(x / scale[:, None], -448.0), 448.0)
    else:
        kept = x
    tl.store(target, kept.to(target.dtype.element_ty), mask=mask & is_stored[:, None])


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
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST: tl.constexpr,
    REST_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    NORM_Q: tl.constexpr,
    NORM_K: tl.constexpr,
    FP8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_real = head < HEADS + 2 * KV_HEADS
    turns = head < HEADS + KV_HEADS
    slot = tl.load(slot_mapping + token)
    stored = head - HEADS
    # as a vector: the interpreter makes integers of a vector's and a scalar's truth
    is_stored = (stored >= 0) & is_real & (tl.zeros_like(head) + slot >= 0)
    slot = tl.maximum(slot, 0)
    line = (
        slot // BLOCK * cache_block_stride
        + slot % BLOCK * cache_token_stride
        + stored // KV_HEADS * cache_kv_stride
        + stored % KV_HEADS * cache_head_stride
    )
    state = states + token * token_stride + head * head_stride
    scale = tl.where(is_key, k_scale, v_scale)
    NORM: tl.constexpr = NORM_Q or NORM_K

    half = tl.arange(0, HALF_PAD)
    rest = tl.arange(0, REST_PAD)
    half_mask = is_real[:, None] & (half < HALF)[None, :]
    rest_mask = is_real[:, None] & (rest < REST)[None, :]
    squares = tl.zeros([BLOCK_HEADS], tl.float32)
    if HALF > 0:
        low = tl.load(state[:, None] + half[None, :], mask=half_mask, other=0.0).to(tl.float32)
        high = tl.load(state[:, None] + (half + HALF)[None, :], mask=half_mask, other=0.0).to(tl.float32)
        squares += tl.sum(low * low, 1) + tl.sum(high * high, 1)
    if REST > 0:
        last = tl.load(state[:, None] + (rest + 2 * HALF)[None, :], mask=rest_mask, other=0.0).to(tl.float32)
        squares += tl.sum(last * last, 1)
    dtype = states.dtype.element_ty
    if NORM:
        if NORM_Q and NORM_K:
            normed = is_query | is_key
        elif NORM_Q:
            normed = is_query
        else:
            normed = is_key
        inverse = tl.rsqrt(squares / D + tl.where(is_query, q_eps, k_eps))
        inverse = tl.where(normed, inverse, 1.0)[:, None]
    if HALF > 0:
        if NORM:
            inside = half < HALF
            gain = _gain(q_weight, k_weight, half, inside, is_query, is_key, NORM_Q, NORM_K)
            low = (low * inverse * gain).to(dtype).to(tl.float32)
            gain = _gain(q_weight, k_weight, half + HALF, inside, is_query, is_key, NORM_Q, NORM_K)
            high = (high * inverse * gain).to(dtype).to(tl.float32)
        at = table + tl.load(positions + token) * (4 * HALF) + half
        inside = half < HALF
        cos_low = tl.load(at, mask=inside, other=0.0).to(tl.float32)[None, :]
        cos_high = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
        sin_low = tl.load(at + 2 * HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
        sin_high = tl.load(at + 3 * HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
        # rounded after the first product, as the twin's two operations do
        turned_low = (low * cos_low).to(dtype).to(tl.float32) + high * sin_low
        turned_high = (high * cos_high).to(dtype).to(tl.float32) + low * sin_high
        low = tl.where(turns[:, None], turned_low, low).to(dtype).to(tl.float32)
        high = tl.where(turns[:, None], turned_high, high).to(dtype).to(tl.float32)
        target = cache + line[:, None] + half[None, :]
        _write(low, state[:, None] + half[None, :], target, half_mask, is_stored, scale, FP8, True, turns)
        _write(
            high, state[:, None] + (half + HALF)[None, :], target + HALF, half_mask, is_stored, scale, FP8, True, turns
        )
    if REST > 0:
        if NORM:
            inside = rest < REST
            gain = _gain(q_weight, k_weight, rest + 2 * HALF, inside, is_query, is_key, NORM_Q, NORM_K)
            last = (last * inverse * gain).to(dtype).to(tl.float32)
        target = cache + line[:, None] + (rest + 2 * HALF)[None, :]
        _write(last, state[:, None] + (rest + 2 * HALF)[None, :], target, rest_mask, is_stored, scale, FP8, NORM, turns)
