"""RMS norm, alone or after adding to the residual stream: torch twins of the fused kernels, and the choice between them.

Shapes: ``N`` leading elements of any shape, ``d`` normalised width.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from enginebay.kernels import triton
from enginebay.kernels.cpu import ops


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, computed in float32: ``x [N, d]``, ``weight [d]``.

    The weight may be float32 beside 16-bit `x`: then it is applied in float32, and the result rounded to x's dtype.
    """
    if x.is_contiguous():
        if triton.usable(x):
            from enginebay.kernels.triton import norm

            return norm.rms_norm(x, None, weight, eps)
        if ops.usable(x, weight):
            return ops.rms_norm(x, None, weight, eps)
    if weight.dtype != x.dtype:
        return rms_norm(x.float(), weight, eps).to(x.dtype)
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add ``x [N, d]`` to `residual` in place, and return the sum's `rms_norm`."""
    if x.is_contiguous() and residual.is_contiguous():
        if triton.usable(x) and x.dtype == residual.dtype:
            from enginebay.kernels.triton import norm

            return norm.rms_norm(x, residual, weight, eps)
        if ops.usable(x, residual, weight):
            return ops.rms_norm(x, residual, weight, eps)
    residual.add_(x)
    return rms_norm(residual, weight, eps)
