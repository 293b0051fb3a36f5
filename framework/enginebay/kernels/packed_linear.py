"""Matrix products on CPU over weights packed once, ahead, in place of the plain matrix.

Two orders. *Panels* are our own kernel's, for bfloat16 where the processor has avx512_bf16 (``kernels/cpu/linear.cpp`` draws
it): one token runs at memory speed, and a row's result depends on no other row. *oneDNN's* is opaque, for float32 and for
bfloat16 elsewhere: ``F.linear`` reorders the weight in every call, which at a few tokens costs as much as the product; torch
has these operators for its compiler. Where neither serves, `pack` gives None and the plain product stands.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional

from enginebay.kernels.cpu import ops

#: tokens that oneDNN's order is chosen for; it serves every number
_TOKENS = 32
#: outputs of a panel, as linear.cpp has it
_PANEL = 32


class PackedMatrix(ABC):
    """A matrix ``[out, in]`` in an order of its own."""

    @abstractmethod
    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x [T, in]`` in the weight's dtype to ``[T, out]``."""

    @abstractmethod
    def unpacked(self) -> Tensor:
        """The matrix ``[out, in]`` again, exactly."""

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor | None:
        """Rows int64 ``[T]`` of the matrix, ``[T, in]``; None where the order does not let them be read."""


class PanelMatrix(PackedMatrix):
    """Panels of 32 outputs, ``[ceil(out / 32), ceil(in / 2), 32, 2]``; both sizes are padded with zeros."""

    def __init__(self, weight: Tensor) -> None:
        self._outputs, self._inputs = weight.shape
        padded = functional.pad(weight.detach(), (0, self._inputs % 2, 0, -self._outputs % _PANEL))
        self._panels = padded.view(-1, _PANEL, padded.shape[1] // 2, 2).transpose(1, 2).contiguous()
        self._bias: Tensor | None = None

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `PackedMatrix`."""
        if self._inputs % 2:
            x = functional.pad(x, (0, 1))
        if bias is not None and self._bias is None:  # a layer has one bias, so it is padded once
            self._bias = functional.pad(bias.detach(), (0, -self._outputs % _PANEL))
        return ops.linear(x, self._panels, None if bias is None else self._bias, self._outputs)

    def unpacked(self) -> Tensor:
        """See `PackedMatrix`."""
        return self._panels.transpose(1, 2).flatten(2).flatten(0, 1)[: self._outputs, : self._inputs].contiguous()

    def rows(self, ids: Tensor) -> Tensor:
        """See `PackedMatrix`."""
        return self._panels[ids // _PANEL, :, ids % _PANEL].flatten(1)[:, : self._inputs]


class OneDnnMatrix(PackedMatrix):
    """oneDNN's order."""

    def __init__(self, weight: Tensor) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TOKENS)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `PackedMatrix`."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return out

    def unpacked(self) -> Tensor:
        """See `PackedMatrix`."""
        return self._packed.to_dense()

    def rows(self, ids: Tensor) -> None:
        """Not to be had."""
        return


def pack(weight: Tensor) -> PackedMatrix | None:
    """Pack a CPU matrix ``[out, in]`` where that pays; None where the plain product is as good, or all there is."""
    if weight.device.type != "cpu" or weight.dim() != 2 or weight.numel() == 0:
        return None
    if weight.dtype == torch.bfloat16 and ops.has_linear():
        return PanelMatrix(weight)
    return OneDnnMatrix(weight) if _onednn_serves(weight.dtype) else None


def _onednn_serves(dtype: torch.dtype) -> bool:
    """Whether this processor's oneDNN multiplies the dtype natively, and torch has the operators."""
    mkldnn = torch.ops.mkldnn
    if not (torch.backends.mkldnn.is_available() and hasattr(mkldnn, "_linear_pointwise")):  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return hasattr(mkldnn, "_is_mkldnn_bf16_supported") and bool(mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
