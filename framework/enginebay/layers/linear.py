"""Linear layers: a weight method, an optional bias, and the sum over ranks where inputs are split.

Shapes: ``T`` tokens, ``in`` and ``out`` features on this rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from enginebay.interfaces.quant import Axis, LayerInfo, LinearMethod, WeightSpec
from enginebay.kernels.packed_linear import PackedMatrix, pack
from enginebay.layers.weights import WeightModule


class PlainLinear(LinearMethod):
    """Weights in the compute dtype; on CPU packed once loaded, in place of the parameter. One instance a layer."""

    replayable = True

    def __init__(self) -> None:
        self._packed: PackedMatrix | None = None

    def weights(self, layer: LayerInfo) -> dict[str, WeightSpec]:
        """One matrix ``[out, in]``."""
        return {"weight": WeightSpec(axes=(Axis("out"), Axis("in")), dtype=layer.dtype)}

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """One matrix product."""
        if self._packed is not None:
            return self._packed.product(x, bias)
        weight: Tensor = layer.weight  # type: ignore[assignment]
        return functional.linear(x, weight, bias)

    def finish_loading(self, layer: nn.Module) -> None:
        """Pack where that pays."""
        weight = layer.get_parameter("weight")
        self._packed = pack(weight)
        if self._packed is not None:
            weight.data = weight.data.new_empty(0)

    def dense_weight(self, layer: nn.Module) -> Tensor:
        """The matrix, unpacked if need be."""
        return layer.get_parameter("weight").data if self._packed is None else self._packed.unpacked()


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

    def _rearrange(self) -> None:
        self.method.finish_loading(self)

    def dense_weight(self) -> Tensor:
        """The matrix ``[out, in]`` in the compute dtype; `ModelError` where the method cannot give it."""
        return self.method.dense_weight(self)
