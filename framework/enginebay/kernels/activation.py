"""Gated activations of ``[gate | up]``: torch twins of the fused kernels, and the choice between them.

``F`` is the MLP's width on this rank.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from enginebay.kernels import triton
from enginebay.kernels.cpu import ops


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up``: ``[T, 2F]`` to ``[T, F]``."""
    if gate_up.dim() == 2 and gate_up.is_contiguous():
        if triton.usable(gate_up):
            return _fused(gate_up, "silu")
        if ops.usable(gate_up):
            return ops.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """``gelu(gate) * up`` with the tanh approximation: ``[T, 2F]`` to ``[T, F]``."""
    if gate_up.dim() == 2 and gate_up.is_contiguous() and triton.usable(gate_up):
        return _fused(gate_up, "gelu_tanh")
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """``gelu(gate) * up`` with the exact error function: ``[T, 2F]`` to ``[T, F]``."""
    if gate_up.dim() == 2 and gate_up.is_contiguous() and triton.usable(gate_up):
        return _fused(gate_up, "gelu")
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate).mul_(up)


def _fused(gate_up: Tensor, activation: str) -> Tensor:
    from enginebay.kernels.triton.activation import gated

    return gated(gate_up, activation)
