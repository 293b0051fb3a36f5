"""RMS norm, alone or after adding to the residual stream, in one pass over memory. Twin: `enginebay.kernels.norm`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: elements a thread holds at least; more warps would only wait for each other
_ELEMENTS_PER_THREAD = 8


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """``x [..., d]`` normalised, in x's dtype; a residual of x's shape gets `x` added in place and is what is normalised.

    Computed in float32 and rounded once; the residual is rounded first, as it is kept. Both contiguous; ``weight [d]`` may be
    float32 beside 16-bit activations. A launch from Python costs some 20 µs of the host, more than torch's own norm: it pays
    inside CUDA graphs, and wherever the GPU is the slower of the two.
    """
    width = x.shape[-1]
    out = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _rms_norm[(x.numel() // width,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        eps,
        WIDTH=width,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        num_warps=min(16, max(1, block // (32 * _ELEMENTS_PER_THREAD * 2))),
    )
    return out


@triton.jit
def _rms_norm(x, residual, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    # does not wait for the sum, so it is asked for first
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        summed = value + tl.load(residual + start + column, mask=inside, other=0.0).to(tl.float32)
        kept = summed.to(residual.dtype.element_ty)
        tl.store(residual + start + column, kept, mask=inside)
        value = kept.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    tl.store(out + start + column, (value * scale * gain).to(out.dtype.element_ty), mask=inside)
