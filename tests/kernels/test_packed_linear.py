"""Packed matrix products against the plain one, and the law that no row depends on another."""

from __future__ import annotations

import pytest
import torch
from enginebay.kernels.cpu import ops
from enginebay.kernels.packed_linear import OneDnnMatrix, PackedMatrix, PanelMatrix, pack
from torch.nn import functional

SHAPES = [(7, 5), (64, 64), (33, 34), (960, 576)]


def packed(weight: torch.Tensor, kind: type[PackedMatrix]) -> PackedMatrix:
    if kind is PanelMatrix and not ops.has_linear():
        pytest.skip("this processor has no avx512_bf16, or there is no compiler")
    if kind is OneDnnMatrix and weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor's oneDNN does not serve bfloat16")
    made: PackedMatrix = kind(weight)  # type: ignore[call-arg]
    return made


KINDS = [(PanelMatrix, torch.bfloat16), (OneDnnMatrix, torch.bfloat16), (OneDnnMatrix, torch.float32)]


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [0, 1, 5, 13, 33, 70])
@pytest.mark.parametrize("bias", [False, True])
def test_products_equal_the_plain_one(
    kind: type[PackedMatrix], dtype: torch.dtype, shape: tuple[int, int], tokens: int, bias: bool
) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(shape) / shape[1] ** 0.5).to(dtype)
    x = torch.randn(tokens, 2 * shape[1]).to(dtype)[:, : shape[1]]  # rows with gaps between them
    added = torch.randn(shape[0]).to(dtype) if bias else None
    matrix = packed(weight, kind)
    torch.testing.assert_close(matrix.product(x, added), functional.linear(x, weight, added))
    torch.testing.assert_close(matrix.product(x, added), functional.linear(x, weight, added))
    assert torch.equal(matrix.unpacked(), weight)


@pytest.mark.parametrize("shape", SHAPES)
def test_panels_give_a_row_the_same_bits_in_any_company(shape: tuple[int, int]) -> None:
    """DESIGN's equality: batch composition and threads change nothing."""
    torch.manual_seed(1)
    matrix = packed(torch.randn(shape).bfloat16(), PanelMatrix)
    x = torch.randn(71, shape[1]).bfloat16()
    whole = matrix.product(x, None)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(matrix.product(x, None), whole)
    finally:
        torch.set_num_threads(threads)
    for start, stop in ((0, 1), (70, 71), (3, 8), (0, 12), (5, 18), (1, 32), (0, 64)):
        assert torch.equal(matrix.product(x[start:stop], None), whole[start:stop])


def test_panels_sum_in_float32() -> None:
    """A bfloat16 sum would lose every small term behind the first."""
    weight = torch.full((32, 4096), 2.0**-9).bfloat16()
    weight[:, 0] = 1.0
    matrix = packed(weight, PanelMatrix)
    out = matrix.product(torch.ones(1, 4096).bfloat16(), None)
    assert torch.equal(out, torch.full((1, 32), 1.0 + 4095 * 2.0**-9).bfloat16())


def test_panels_read_rows_exactly() -> None:
    weight = torch.randn(50, 35).bfloat16()
    ids = torch.tensor([0, 49, 31, 32, 31])
    rows = packed(weight, PanelMatrix).rows(ids)
    assert rows is not None
    assert torch.equal(rows, weight[ids])
    assert packed(weight.float(), OneDnnMatrix).rows(ids) is None


def test_values_that_are_no_numbers_stay_where_they_are() -> None:
    x = torch.ones(3, 64).bfloat16()
    x[1, 5] = float("nan")
    out = packed(torch.ones(40, 64).bfloat16(), PanelMatrix).product(x, None)
    assert out[1].isnan().all()
    assert not out[[0, 2]].isnan().any()


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
    assert pack(weight) is None


def test_without_the_kernel_bfloat16_takes_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "has_linear", lambda: False)
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert isinstance(pack(torch.ones(4, 4).bfloat16()), OneDnnMatrix)
    assert isinstance(pack(torch.ones(4, 4)), OneDnnMatrix)
