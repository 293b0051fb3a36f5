"""RMS norm, alone or after adding to the residual stream: torch twins of the fused kernels.

Shapes: ``N`` leading elements of any shape, ``d`` normalised width.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, computed in float32: ``x [N, d]``, ``weight [d]``."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add ``x [N, d]`` to `residual` in place, and return the sum's `rms_norm`."""
    residual.add_(x)
    return functional.rms_norm(residual, (residual.shape[-1],), weight, eps)
