"""RMS norms whose scale is one plus the weight, against transformers' Gemma."""

from __future__ import annotations

import pytest
import torch
from enginebay.layers.norm import RMSNorm
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

CPU = torch.device("cpu")
EPS = 1e-6


def pair(dtype: torch.dtype, size: int = 48) -> tuple[RMSNorm, Gemma3RMSNorm]:
    """The same norm twice; weights of the checkpoint's precision, most of them near 0."""
    torch.manual_seed(0)
    theirs = Gemma3RMSNorm(size, EPS)
    theirs.weight.data = torch.randn(size).mul_(0.01).to(dtype)
    theirs.weight.data[0] = 40.25
    ours = RMSNorm("norm", size, EPS, dtype, CPU, unit_offset=True)
    [target] = ours.targets()
    target.fill(theirs.weight.data)
    ours.finish_loading()
    return ours, theirs


def close(found: Tensor, wanted: Tensor) -> None:
    """Equal but for the order of a float32 sum."""
    assert found.dtype == wanted.dtype
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    else:
        assert (found != wanted).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_it_equals_transformers(dtype: torch.dtype) -> None:
    ours, theirs = pair(dtype)
    assert ours.weight.dtype == torch.float32
    x = torch.randn(64, 48).to(dtype)
    close(ours(x), theirs(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_a_residual_is_added_in_place_first(dtype: torch.dtype) -> None:
    ours, theirs = pair(dtype)
    x, residual = torch.randn(64, 48).to(dtype), torch.randn(64, 48).to(dtype)
    summed = x + residual
    out, same = ours(x, residual)
    assert same is residual
    assert torch.equal(residual, summed)
    close(out, theirs(summed))


@torch.no_grad()
def test_heads_inside_a_wider_row_are_normalised() -> None:
    """Queries are a slice of the fused projection, so their rows are not contiguous."""
    ours, theirs = pair(torch.bfloat16, size=16)
    states = torch.randn(5, 6, 16).bfloat16()
    close(ours(states[:, :4]), theirs(states[:, :4]))


@torch.no_grad()
def test_a_16_bit_scale_would_differ() -> None:
    """Otherwise equality above would not prove that the scale is kept in float32."""
    _, theirs = pair(torch.bfloat16)
    rounded = (1.0 + theirs.weight).bfloat16()
    x = torch.randn(64, 48).bfloat16()
    coarse = torch.nn.functional.rms_norm(x, (48,), rounded, EPS)
    assert (coarse != theirs(x)).float().mean() > 0.05
