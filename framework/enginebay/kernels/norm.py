"""RMS norm, alone or after adding to the residual stream: torch twins of the fused kernels.

Shapes: ``N`` leading elements of any shape, ``d`` normalised width.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from enginebay.kernels.cpu import ops


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, computed in float32: ``x [N, d]``, ``weight [d]``."""
    if ops.usable(x, weight) and x.is_contiguous():
        return ops.rms_norm(x, None, weight, eps)
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add ``x [N, d]`` to `residual` in place, and return the sum's `rms_norm`."""
    if ops.usable(x, residual, weight) and x.is_contiguous() and residual.is_contiguous():
        return ops.rms_norm(x, residual, weight, eps)
    residual.add_(x)
    return functional.rms_norm(residual, (residual.shape[-1],), weight, eps)
