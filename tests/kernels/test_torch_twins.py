"""Torch twins of the fused kernels against transformers' modules and plain definitions."""

from __future__ import annotations

import pytest
import torch
from enginebay.kernels.activation import gelu_mul, gelu_tanh_mul, silu_mul
from enginebay.kernels.kv_write import reshape_and_cache
from enginebay.kernels.norm import add_rms_norm, rms_norm
from enginebay.plugins.records import CANONICAL_AXES, HND, NHD, KVLayout
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm

DTYPES = [torch.float32, torch.bfloat16]


def reference_norm(size: int, dtype: torch.dtype) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(size, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight, mean=1.0, std=0.3)
    return norm


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_equals_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = reference_norm(96, dtype)
    for scale in (1e-3, 1.0, 300.0):  # 300^2 would overflow nothing in float32, but loses everything in bfloat16 sums
        x = (torch.randn(7, 96) * scale).to(dtype)
        with torch.no_grad():
            torch.testing.assert_close(rms_norm(x, norm.weight, 1e-5), norm(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_updates_the_residual(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = reference_norm(64, dtype)
    x, residual = torch.randn(5, 64).to(dtype), torch.randn(5, 64).to(dtype)
    total = residual + x
    with torch.no_grad():
        got = add_rms_norm(x, residual, norm.weight, 1e-5)
        assert torch.equal(residual, total)
        torch.testing.assert_close(got, norm(total))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activations(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 64).to(dtype)
    before, gate, up = x.clone(), x[:, :32], x[:, 32:]
    torch.testing.assert_close(silu_mul(x), functional.silu(gate) * up)
    torch.testing.assert_close(gelu_tanh_mul(x), functional.gelu(gate, approximate="tanh") * up)
    torch.testing.assert_close(gelu_mul(x), functional.gelu(gate) * up)
    assert torch.equal(x, before)


BLOCKS, BLOCK, HEADS, SIZE = 5, 4, 2, 3


def empty_cache(layout: KVLayout, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    sizes = dict(zip(CANONICAL_AXES, (BLOCKS, 2, BLOCK, HEADS, SIZE), strict=True))
    stored = torch.full([sizes[axis] for axis in layout.axes], -9.0, dtype=dtype)
    return stored.permute([layout.axes.index(axis) for axis in CANONICAL_AXES])


@given(
    slots=st.lists(st.integers(BLOCK, BLOCKS * BLOCK - 1), unique=True, max_size=12),
    padding=st.integers(0, 3),
    layout=st.sampled_from([NHD, HND]),
)
def test_the_write_touches_its_slots_only(slots: list[int], padding: int, layout: KVLayout) -> None:
    tokens = len(slots) + padding
    qkv = torch.randn(tokens, 7, SIZE)  # three query heads before the keys and values: a strided source
    key_value = qkv[:, 3:].view(tokens, 2, HEADS, SIZE)
    cache, want = empty_cache(layout), empty_cache(NHD)
    mapping = torch.tensor(slots + [-1] * padding, dtype=torch.int64)
    before = mapping.clone()
    reshape_and_cache(key_value, cache, mapping)
    for token, slot in enumerate(slots):
        want[slot // BLOCK, :, slot % BLOCK] = key_value[token]
    assert torch.equal(cache[1:], want[1:])
    assert torch.equal(mapping, before)  # other layers of the group read it next
    null = cache[0].clone()
    null[:, 0] = -9.0  # padding may land in the null block's first slot, nowhere else
    assert torch.equal(null, want[0])


def test_the_write_converts_to_the_caches_dtype() -> None:
    cache = empty_cache(NHD, torch.bfloat16)
    key_value = torch.randn(1, 2, HEADS, SIZE)
    reshape_and_cache(key_value, cache, torch.tensor([BLOCK + 1]))
    assert torch.equal(cache[1, :, 1], key_value[0].bfloat16())
