"""RMS norm with an optional residual. ``d`` is the normalised width."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor, nn

from enginebay.interfaces.quant import Axis, LayerInfo, Part, Shard, WeightSpec
from enginebay.kernels.norm import add_rms_norm, rms_norm
from enginebay.layers.weights import WeightModule


class RMSNorm(WeightModule):
    """Root-mean-square norm with a learned scale, whole on every rank."""

    weight: nn.Parameter

    def __init__(self, name: str, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        whole = Shard.whole(size)
        super().__init__(LayerInfo(name=name, kind="norm", parts=(Part("", whole),), input=whole, dtype=dtype), device)
        self.eps = eps
        self.add_weight("weight", WeightSpec(axes=(Axis("out"),), dtype=dtype))

    @overload
    def forward(self, x: Tensor) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """``[..., d]`` normalised; with a residual, adds to it in place first and returns both."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps)
        return add_rms_norm(x, residual, self.weight, self.eps), residual
