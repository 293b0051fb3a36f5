"""RMS norm with an optional residual. ``d`` is the normalised width."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor, nn

from enginebay.interfaces.quant import Axis, LayerInfo, Part, Shard, WeightSpec
from enginebay.kernels.norm import add_rms_norm, rms_norm
from enginebay.layers.weights import WeightModule


class RMSNorm(WeightModule):
    """Root-mean-square norm with a learned scale, whole on every rank.

    Parameters
    ----------
    name
        Its path in the checkpoint.
    size
        ``d``.
    eps
        Added to the mean square.
    dtype, device
        Of activations, and where the scale is kept.
    unit_offset
        The scale is one plus the checkpoint's weight, kept and applied in float32: a 16-bit sum would lose most of a
        small weight's digits.
    """

    weight: nn.Parameter

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        *,
        unit_offset: bool = False,
    ) -> None:
        whole = Shard.whole(size)
        super().__init__(LayerInfo(name=name, kind="norm", parts=(Part("", whole),), input=whole, dtype=dtype), device)
        self.eps = eps
        self._unit_offset = unit_offset
        self.add_weight("weight", WeightSpec(axes=(Axis("out"),), dtype=torch.float32 if unit_offset else dtype))

    @overload
    def forward(self, x: Tensor) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """``[..., d]`` normalised; with a residual, adds to it in place first and returns both."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps)
        return add_rms_norm(x, residual, self.weight, self.eps), residual

    def _rearrange(self) -> None:
        if self._unit_offset:
            self.weight.data.add_(1.0)
