"""What the kernels share: addresses of paged keys, scores in base two, and the online softmax's arithmetic.

Softmax is computed with powers of two, which the hardware has: scores are multiplied by log2(e) first, and a running
maximum per query keeps them small (Milakov and Gimelshein 2018; Dao 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

#: what is multiplied to turn natural exponents into powers of two, and what turns their logarithms back
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453

_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def scaled_scores(dots, scale, cap, HAS_CAP: tl.constexpr):
    """Products of queries and keys as scores in base two: scaled, and capped by ``cap * tanh(score / cap)``.

    `scale` holds log2(e) where there is no cap.
    """
    if HAS_CAP:
        # tanh by an exponential, kept where it does not overflow: beyond, tanh is 1 to all digits
        tanh = 1.0 - 2.0 / (tl.exp2(tl.minimum(dots * (scale / cap * 2.0 * _LOG2_E), 80.0)) + 1.0)
        return tanh * (cap * _LOG2_E)
    return dots * scale


@triton.jit
def blocks_at(table, positions, end, PAGE: tl.constexpr):
    """A row's blocks that hold `positions`; those from `end` on, which may have none, are given the null block.

    Loops carry the blocks of their next tile along, for a load whose address waits for another is not pipelined well.
    """
    return tl.load(table + positions // PAGE, mask=positions < end, other=0)


@triton.jit
def key_offsets(blocks, positions, block_stride, token_stride, PAGE: tl.constexpr):
    """int64 offsets of the keys at `positions`, which lie in `blocks`."""
    return blocks.to(tl.int64) * block_stride + (positions % PAGE) * token_stride
