"""Gated activations of ``[gate | up]`` in one pass over memory. Twin: `enginebay.kernels.activation`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: output elements a program
_BLOCK = 2048


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up``: contiguous ``[T, 2F]`` to ``[T, F]``.

    Parameters
    ----------
    gate_up
        Contiguous ``[T, 2F]``.
    activation
        ``"silu"``, ``"gelu_tanh"`` (tanh approximation) or ``"gelu"`` (exact).
    """
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    # Along the first axis a grid may have more programs than there are tokens in any step.
    _gated[(tokens, triton.cdiv(width, _BLOCK))](
        gate_up, out, WIDTH=width, BLOCK=_BLOCK, ACTIVATION=activation, num_warps=4
    )
    return out


@triton.jit
def _gated(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    source = gate_up + token * (2 * WIDTH) + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        active = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # tanh by an exponential, kept where it does not overflow: beyond, tanh is 1 to all digits
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = 0.5 * gate * (2.0 - 2.0 / (tl.exp(tl.minimum(2.0 * inner, 60.0)) + 1.0))
    # rounded between the two operations, as the model's own two would be
    rounded = active.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * WIDTH + column, (rounded * up).to(out.dtype.element_ty), mask=inside)
