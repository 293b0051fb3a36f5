"""Typed wrappers of the compiled CPU kernels. Each pairs with a torch twin, which says what it computes.

A caller asks `usable` for its tensors once a call; what is not usable goes to the twin. Kernels take float32 and bfloat16,
compute in float32, and round once, where the twin's separate operators round at every step.

Shapes: ``T`` tokens, ``H`` query heads, ``K`` KV heads, ``D`` head size, ``R`` rows, ``d`` width, ``F`` MLP width.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable

import torch
from torch import Tensor

from enginebay.kernels.cpu.library import library
from enginebay.kernels.cpu.recording import ACTIVE

_DTYPES = (torch.bfloat16, torch.float32)
#: multiply-adds below which waking a second thread costs more than it saves
_PARALLEL_WORK = 40_000


def usable(*tensors: Tensor) -> bool:
    """Whether all are CPU tensors of one dtype that the kernels take, last axis contiguous, and the kernels are there."""
    first = tensors[0]
    return (
        first.is_cpu
        and first.dtype in _DTYPES
        and all(t.dtype == first.dtype and t.is_cpu and t.stride(-1) == 1 for t in tensors)
        and library() is not None
    )


def decodes(device_type: str, dtype: torch.dtype) -> bool:
    """Whether `decode_attention` serves a cache and queries of this dtype on this device."""
    return device_type == "cpu" and dtype in _DTYPES and library() is not None


def _threads(work: int) -> int:
    return torch.get_num_threads() if work > _PARALLEL_WORK else 1


class Kernel:
    """A compiled function. Its arguments travel as one packed row of 8-byte fields, as the C structure has them.

    Parameters
    ----------
    name
        The function.
    fields
        A letter each, as `struct` has them: ``P`` address (0: none), ``q`` integer, ``d`` float.
    """

    def __init__(self, name: str, fields: str) -> None:
        self._name = name
        self._pack = struct.Struct(fields).pack

    @functools.cached_property
    def _entry(self) -> tuple[Callable[[bytes], None], int]:
        found = library()
        assert found is not None  # `usable` said so
        function = getattr(found, self._name)
        function.argtypes, function.restype = (ctypes.c_char_p,), None
        return function, ctypes.cast(function, ctypes.c_void_p).value or 0

    def __call__(self, *values: float) -> None:
        """Run it, and keep the call where a recording is active."""
        function, address = self._entry
        arguments = self._pack(*values)
        if (recording := ACTIVE.recording) is not None:
            recording.add(address, arguments)
        function(arguments)


_RMS_NORM = Kernel("eb_rms_norm", "qPPPPqqdq")
_SILU_MUL = Kernel("eb_silu_mul", "qPPqqq")
_ARGMAX = Kernel("eb_argmax", "qPqPqqq")
_LINEAR = Kernel("eb_linear", "PqPPPqqqqq")
_ROPE_AND_CACHE = Kernel("eb_rope_and_cache", "qPqPPqPP10q")
_DECODE_ATTENTION = Kernel("eb_decode_attention", "qPqP4qPqPPqP6qddq")


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """``x [..., d]`` contiguous; a residual of the same shape is added to in place first. Returns ``[..., d]``."""
    width = x.shape[-1]
    rows = x.numel() // width
    out = torch.empty_like(x)
    _RMS_NORM(
        x.dtype == torch.bfloat16,
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        rows,
        width,
        eps,
        _threads(rows * width) if rows > 1 else 1,
    )
    return out


def has_linear() -> bool:
    """Whether `linear` is there: the processor has avx512_bf16, and the kernels could be built."""
    found = library()
    return found is not None and bool(found.eb_linear_supported())


def linear(x: Tensor, panels: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """``x [T, in]`` bfloat16, `in` even, times `packed_linear.PanelMatrix` panels; bias padded to whole panels.

    Returns ``[T, outputs]``.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, inputs = x.shape
    out = x.new_empty(rows, outputs)
    _LINEAR(
        x.data_ptr(),
        x.stride(0),
        panels.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        outputs,
        rows,
        outputs,
        inputs,
        _threads(rows * outputs * inputs),
    )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """``[T, 2F]`` contiguous to ``[T, F]``."""
    rows, both = gate_up.shape
    out = gate_up.new_empty(rows, both // 2)
    _SILU_MUL(
        gate_up.dtype == torch.bfloat16,
        gate_up.data_ptr(),
        out.data_ptr(),
        rows,
        both // 2,
        _threads(rows * both) if rows > 1 else 1,
    )
    return out


def argmax(x: Tensor) -> Tensor:
    """``[R, n]`` with at least one column to the first index of each row's largest value, int64 ``[R]``."""
    rows, n = x.shape
    out = torch.empty(rows, dtype=torch.int64)
    _ARGMAX(
        x.dtype == torch.bfloat16,
        x.data_ptr(),
        x.stride(0),
        out.data_ptr(),
        rows,
        n,
        _threads(rows * n) if rows > 1 else 1,
    )
    return out


def rope_and_cache(
    states: Tensor, num_heads: int, positions: Tensor, table: Tensor | None, cache: Tensor, slot_mapping: Tensor
) -> None:
    """Rotate queries and keys in place, and write keys and values to the cache; a token of slot -1 is not written.

    states ``[T, H + 2K, D]``, heads contiguous; positions and slot_mapping int64 ``[T]``; table ``[P, 2, rotated]`` or None;
    cache ``[blocks, 2, block, K, D]``.
    """
    tokens, all_heads, head_dim = states.shape
    _ROPE_AND_CACHE(
        states.dtype == torch.bfloat16,
        states.data_ptr(),
        states.stride(0),
        positions.data_ptr(),
        0 if table is None else table.data_ptr(),
        0 if table is None else table.shape[-1],
        slot_mapping.data_ptr(),
        cache.data_ptr(),
        *cache.stride()[:4],
        tokens,
        num_heads,
        (all_heads - num_heads) // 2,
        head_dim,
        cache.shape[2],
        _threads(tokens * all_heads * head_dim) if tokens > 1 else 1,
    )


def with_heads(query: Tensor, out: Tensor, lse: Tensor | None) -> Tensor:
    """`query` ``[T, H, D]`` with contiguous heads, copied if need be; refuses outputs that could not be written in place."""
    heads = (query.shape[2], 1)
    if out.stride()[1:] != heads or (lse is not None and not lse.is_contiguous()):
        raise ValueError(f"out and lse need contiguous heads, not strides {out.stride()}")
    return query if query.stride()[1:] == heads else query.contiguous()


def attention_fields(
    query: Tensor, cache: Tensor, window: int | None, scale: float, soft_cap: float | None
) -> tuple[float, ...]:
    """The fields that end every attention kernel's arguments, from ``heads`` on."""
    _, heads, head_dim = query.shape
    shape = (heads, cache.shape[3], head_dim, cache.shape[2])
    return (*shape, window or 0, scale, soft_cap or 0.0, torch.get_num_threads())


def decode_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    lse: Tensor | None = None,
) -> None:
    """One query token a row over its cached tokens, read through the block table.

    query ``[R, H, D]``; out ``[R, H, D]`` with contiguous heads; cache ``[blocks, 2, block, K, D]``; block_table int32
    ``[R, B]``; seq_lens int32 ``[R]``, at least 1; lse float32 ``[R, H]`` contiguous, natural log. Positions past seq_len
    are not read.
    """
    query = with_heads(query, out, lse)
    _DECODE_ATTENTION(
        query.dtype == torch.bfloat16,
        query.data_ptr(),
        query.stride(0),
        cache.data_ptr(),
        *cache.stride()[:4],
        block_table.data_ptr(),
        block_table.stride(0),
        seq_lens.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        0 if lse is None else lse.data_ptr(),
        query.shape[0],
        *attention_fields(query, cache, window, scale, soft_cap),
    )
