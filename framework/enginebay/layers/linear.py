"""Linear layers: a weight method, an optional bias, and the sum over ranks where inputs are split.

Shapes: ``T`` tokens, ``in`` and ``out`` features on this rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from enginebay.interfaces.quant import Axis, LayerInfo, LinearMethod, WeightSpec
from enginebay.layers.weights import WeightModule


class PlainLinear(LinearMethod):
    """Weights as they are, in the compute dtype."""

    def weights(self, layer: LayerInfo) -> dict[str, WeightSpec]:
        """One matrix ``[out, in]``."""
        return {"weight": WeightSpec(axes=(Axis("out"), Axis("in")), dtype=layer.dtype)}

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """One matrix product."""
        return functional.linear(x, layer.get_parameter("weight"), bias)

    def dense_weight(self, layer: nn.Module) -> Tensor:
        """The parameter itself."""
        return layer.get_parameter("weight").data


class Linear(WeightModule):
    """One matrix, or several fused, applied to a flat batch.

    Parameters
    ----------
    info
        The layer's facts on this rank.
    method
        Keeps and applies the weights.
    bias
        Whether the checkpoint has a bias.
    add_bias
        Whether this rank adds it (one rank must, where results are summed).
    reduce
        Sums results over ranks; None where outputs are whole or stay split.
    """

    def __init__(
        self,
        info: LayerInfo,
        method: LinearMethod,
        device: torch.device,
        *,
        bias: bool = False,
        add_bias: bool = True,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(info, device)
        self.method = method
        self._reduce = reduce
        for name, spec in method.weights(info).items():
            self.add_weight(name, spec)
        if bias:
            self.add_weight("bias", WeightSpec(axes=(Axis("out"),), dtype=info.dtype))
        self._adds_bias = bias and add_bias

    def forward(self, x: Tensor) -> Tensor:
        """``[T, in]`` to ``[T, out]``."""
        bias: Tensor | None = self.bias if self._adds_bias else None  # type: ignore[assignment]
        out = self.method.apply(self, x, bias)
        return out if self._reduce is None else self._reduce(out)

    def finish_loading(self) -> None:
        """Let the method rearrange its weights."""
        self.method.finish_loading(self)

    def dense_weight(self) -> Tensor:
        """The matrix ``[out, in]`` in the compute dtype; `ModelError` where the method cannot give it."""
        return self.method.dense_weight(self)
