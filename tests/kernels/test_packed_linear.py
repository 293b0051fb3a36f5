"""Packed matrix products against the plain one."""

from __future__ import annotations

import pytest
import torch
from enginebay.kernels.packed_linear import pack_weight, packable, packed_linear, unpack_weight
from torch.nn import functional

SHAPES = [(7, 5), (64, 64), (960, 576)]


def usable(dtype: torch.dtype) -> None:
    if not packable(torch.ones(2, 2, dtype=dtype)):
        pytest.skip(f"this processor's oneDNN does not serve {dtype}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize("bias", [False, True])
def test_products_equal_the_plain_one(dtype: torch.dtype, shape: tuple[int, int], tokens: int, bias: bool) -> None:
    usable(dtype)
    torch.manual_seed(0)
    weight = (torch.randn(shape) / shape[1] ** 0.5).to(dtype)
    x = torch.randn(tokens, 2 * shape[1]).to(dtype)[:, : shape[1]]  # rows with gaps between them
    added = torch.randn(shape[0]).to(dtype) if bias else None
    packed = pack_weight(weight)
    torch.testing.assert_close(packed_linear(x, packed, added), functional.linear(x, weight, added))
    assert torch.equal(unpack_weight(packed), weight)


@pytest.mark.parametrize(
    "weight",
    [
        torch.ones(2, 2, dtype=torch.float16),
        torch.ones(2, 2, dtype=torch.int8),
        torch.ones(2, 2, 2),
        torch.ones(0, 2),
        torch.ones(2, 2, device="meta"),
    ],
    ids=["float16", "int8", "three_axes", "empty", "meta"],
)
def test_what_is_left_plain(weight: torch.Tensor) -> None:
    assert not packable(weight)
