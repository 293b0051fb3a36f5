"""The compiled kernels against their torch twins; `decode_attention` is held to a reference by the torch backend's tests."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from enginebay.kernels.activation import silu_mul
from enginebay.kernels.argmax import argmax
from enginebay.kernels.cpu import ops
from enginebay.kernels.cpu.library import library
from enginebay.kernels.norm import add_rms_norm, rms_norm
from enginebay.kernels.rope_cache import rope_and_cache
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler here: the kernels cannot be built")

#: float32: another order of sums; bfloat16: the twin rounds at every operator, the kernel once
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2}
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def twin(function: Any, *arguments: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "usable", lambda *tensors: False)
        return function(*arguments)


def close(found: Tensor, wanted: Tensor) -> None:
    scale = wanted.float().abs().max().clamp_min(1e-6)
    assert found.dtype == wanted.dtype
    assert not found.isnan().any()
    assert float((found.float() - wanted.float()).abs().max() / scale) <= TOLERANCE[wanted.dtype]


@given(
    rows=st.integers(1, 40), width=st.integers(1, 700), dtype=DTYPES, residual=st.booleans(), seed=st.integers(0, 99)
)
def test_rms_norm_equals_its_twin(rows: int, width: int, dtype: torch.dtype, residual: bool, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight = (3 * torch.randn(rows, width)).to(dtype), torch.randn(width).to(dtype)
    assert ops.usable(x, weight)
    if not residual:
        close(rms_norm(x, weight, 1e-5), twin(rms_norm, x, weight, 1e-5))
        return
    mine, theirs = torch.randn(rows, width).to(dtype), torch.empty(rows, width, dtype=dtype)
    theirs.copy_(mine)
    close(add_rms_norm(x, mine, weight, 1e-5), twin(add_rms_norm, x, theirs, weight, 1e-5))
    assert torch.equal(mine, theirs)


@given(rows=st.integers(1, 40), width=st.integers(1, 700), dtype=DTYPES, scale=st.sampled_from([1.0, 30.0, 200.0]))
def test_silu_mul_equals_its_twin(rows: int, width: int, dtype: torch.dtype, scale: float) -> None:
    gate_up = (scale * torch.randn(rows, 2 * width)).to(dtype)
    close(silu_mul(gate_up), twin(silu_mul, gate_up))


@given(
    tokens=st.integers(1, 40),
    heads=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    dim=st.sampled_from([2, 16, 64, 80]),
    dtype=DTYPES,
    layout=st.sampled_from(["NHD", "HND"]),
    rotated=st.sampled_from(["none", "half", "all"]),
    seed=st.integers(0, 99),
)
def test_rope_and_cache_equals_its_twin(
    tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, layout: str, rotated: str, seed: int
) -> None:
    torch.manual_seed(seed)
    block, blocks = 4, 12
    states = torch.randn(tokens, heads + 2 * kv_heads, dim).to(dtype)
    width = {"none": 0, "half": dim // 2 // 2 * 2, "all": dim}[rotated]
    table = torch.randn(64, 2, width).to(dtype) if width else None
    positions = torch.randint(0, 64, (tokens,))
    slots = torch.randperm(block * (blocks - 1))[:tokens] + block
    slots[torch.rand(tokens) < 0.2] = -1
    shape = (blocks, 2, kv_heads, block, dim) if layout == "HND" else (blocks, 2, block, kv_heads, dim)
    stored = torch.full(shape, 7.0, dtype=dtype)
    caches = [c.transpose(2, 3) if layout == "HND" else c for c in (stored.clone(), stored.clone())]
    mine, theirs = states.clone(), states.clone()
    rope_and_cache(mine, heads, positions, table, caches[0], slots)
    twin(rope_and_cache, theirs, heads, positions, table, caches[1], slots)
    close(mine, theirs)
    close(caches[0][1:], caches[1][1:])  # block 0 is the null block: the twin writes slot -1 there
    assert torch.equal(caches[0][0], torch.full_like(caches[0][0], 7.0))


def test_what_the_kernels_do_not_take_goes_to_the_twin() -> None:
    x = torch.randn(4, 8)
    assert ops.usable(x)
    assert not ops.usable(x.half())
    assert not ops.usable(x, x.bfloat16())
    assert not ops.usable(x.t())
    assert not ops.usable(x.to("meta"))
    strided = torch.randn(4, 16)[:, ::2]
    close(rms_norm(strided, torch.ones(8), 1e-5), rms_norm(strided.contiguous(), torch.ones(8), 1e-5))


@given(
    rows=st.integers(1, 9),
    width=st.integers(1, 300),
    dtype=DTYPES,
    values=st.sampled_from(["spread", "ties", "-inf", "nan"]),
    seed=st.integers(0, 99),
)
def test_argmax_is_the_first_of_the_largest(rows: int, width: int, dtype: torch.dtype, values: str, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(rows, width + 3).to(dtype)
    if values == "ties":
        x = x.round()
    elif values == "-inf":
        x[:, 1:] = -torch.inf
    elif values == "nan":
        x[torch.rand_like(x, dtype=torch.float32) < 0.1] = torch.nan
    x = x[:, :width]  # rows with gaps between them
    assert ops.usable(x)
    wanted = [
        max(range(width), key=lambda i: (math.isnan(row[i]), 0 if math.isnan(row[i]) else row[i])) for row in x.tolist()
    ]
    assert argmax(x).tolist() == wanted
