"""Matrix products on CPU over weights packed ahead into oneDNN's own order.

``F.linear`` reorders the weight in every call, which at a few tokens costs as much as the product: packed once, a
bfloat16 product of one token takes a little over half the time, one of 32 tokens three quarters. torch has these
operators for its compiler; where they are missing or do not serve the dtype, `packable` says no and the plain product
stands.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: tokens that the packed order is chosen for; it serves every number
_TOKENS = 32


def packable(weight: Tensor) -> bool:
    """Whether `weight` is better packed: a CPU matrix in a dtype that this processor's oneDNN multiplies natively."""
    if weight.device.type != "cpu" or weight.dim() != 2 or weight.numel() == 0:
        return False
    ops = torch.ops.mkldnn
    if not (torch.backends.mkldnn.is_available() and hasattr(ops, "_linear_pointwise")):  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return hasattr(ops, "_is_mkldnn_bf16_supported") and bool(ops._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def pack_weight(weight: Tensor) -> Tensor:
    """A packed copy of ``[out, in]``, opaque but for `unpack_weight` and `packed_linear`."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TOKENS)
    return packed


def unpack_weight(packed: Tensor) -> Tensor:
    """The matrix ``[out, in]`` again, exactly."""
    return packed.to_dense()


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """``x [T, in]`` in the weight's dtype to ``[T, out]``."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out
