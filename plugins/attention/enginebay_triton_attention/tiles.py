"""What the kernels share: addresses of paged keys, scores in base two, and the online softmax over a tile of keys.

Softmax is computed with powers of two, which the hardware has: scores are multiplied by log2(e) first, and a running
maximum per query keeps them small (Milakov and Gimelshein 2018; Dao 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl
from enginebay.interfaces.attention import AttentionLayer
from torch import Tensor

#: what is multiplied to turn natural exponents into powers of two, and what turns their logarithms back
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def kernel_scale(layer: AttentionLayer) -> float:
    """What products of queries and cached keys are multiplied by; log2(e) included where there is no soft cap."""
    scale = layer.spec.scale * layer.k_scale
    return scale if layer.spec.soft_cap is not None else scale * float(LOG2_E.value)


def strides(query: Tensor, out: Tensor, lse: Tensor, block_table: Tensor, cache: Tensor) -> tuple[int, ...]:
    """The strides that both kernels take, in their order: of tokens and heads in the first three, of rows in the table, of
    blocks, tokens and heads in the cache.
    """
    by_token = [stride for tensor in (query, out, lse) for stride in tensor.stride()[:2]]
    return (*by_token, block_table.stride(0), cache.stride(0), cache.stride(2), cache.stride(3))


@triton.jit
def scaled_scores(dots, scale, cap, HAS_CAP: tl.constexpr):
    """Products of queries and keys as scores in base two: scaled, and capped by ``cap * tanh(score / cap)``.

    `scale` holds log2(e) where there is no cap.
    """
    if HAS_CAP:
        # tanh by an exponential, kept where it does not overflow: beyond, tanh is 1 to all digits
        tanh = 1.0 - 2.0 / (tl.exp2(tl.minimum(dots * (scale / cap * 2.0 * LOG2_E), 80.0)) + 1.0)
        return tanh * (cap * LOG2_E)
    return dots * scale


@triton.jit
def key_offsets(blocks, positions, block_stride, token_stride, PAGE: tl.constexpr):
    """int64 offsets of the keys at `positions`, which lie in `blocks`."""
    return blocks.to(tl.int64) * block_stride + (positions % PAGE) * token_stride


@triton.jit
def tile_blocks(table, first, end, PAGE: tl.constexpr, BLOCK_KEYS: tl.constexpr, ONE_PAGE: tl.constexpr):
    """The blocks of a tile's keys, or the one that holds them all; keys from `end` on, which may have none, get the null block.

    Loops carry the blocks of their next tile along, for a load whose address waits for another is not pipelined well.
    """
    if ONE_PAGE:
        positions = first
    else:
        positions = first + tl.arange(0, BLOCK_KEYS)
    return tl.load(table + positions // PAGE, mask=positions < end, other=0)


@triton.jit
def attend_tile(
    query,
    keys,
    values,
    blocks,
    first,
    end,
    positions,
    acc,
    top,
    total,
    block_stride,
    token_stride,
    scale,
    cap,
    window,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The online softmax over `BLOCK_KEYS` keys from position `first` on.

    Masked, a query at ``positions`` sees the keys up to its own and within its window; the row ends at `end`.
    """
    feature = tl.arange(0, D_PAD)
    lane = tl.arange(0, BLOCK_KEYS)
    if ONE_PAGE:
        offsets = key_offsets(blocks, first, block_stride, token_stride, PAGE) + lane * token_stride
    else:
        offsets = key_offsets(blocks, first + lane, block_stride, token_stride, PAGE)
    offsets = offsets[:, None] + feature[None, :]
    if D != D_PAD:
        key = tl.load(keys + offsets, mask=feature[None, :] < D, other=0.0)
    else:
        key = tl.load(keys + offsets)
    dots = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")
    if MASKED or HAS_CAP:
        score = scaled_scores(dots, scale, cap, HAS_CAP)
        if MASKED:
            position = first + lane
            seen = position[None, :] <= positions[:, None]
            if HAS_WINDOW:
                seen = seen & (position[None, :] > positions[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        # A window may hide a whole tile from a query that has seen nothing yet.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(top - base)
    else:
        # scaled after the maximum, so that scaling and subtraction are one multiply-add
        new_top = tl.maximum(top, tl.max(dots, 1) * scale)
        weight = tl.exp2(dots * scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weight, 1)
    acc = acc * shrink[:, None]
    # What lies behind a row's end may be NaN, which a weight of nought would not remove.
    if MASKED:
        value = tl.load(values + offsets, mask=(first + lane < end)[:, None] & (feature < D)[None, :], other=0.0)
    elif D != D_PAD:
        value = tl.load(values + offsets, mask=feature[None, :] < D, other=0.0)
    else:
        value = tl.load(values + offsets)
    acc = tl.dot(weight.to(query.dtype), value.to(query.dtype), acc, input_precision="ieee")
    return acc, new_top, total
