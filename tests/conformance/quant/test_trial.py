"""The verdict: rounding passes, an error of a code does not; and what a sample may state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from enginebay.conformance.quant.cases import Case, all_cases, broken_settings, exact_cases
from enginebay.conformance.quant.checkpoint import DOWN, Shape, draw, sizes_of
from enginebay.conformance.quant.faults import name_faults
from enginebay.conformance.quant.trial import Trial, off, off_weight
from enginebay.conformance.suite import Settings
from enginebay.errors import PluginError
from enginebay.interfaces.quant_sample import QuantSample
from enginebay.loading.open_source import open_source
from grid_quantizer import samples
from hypothesis import given
from hypothesis import strategies as st
from quant_mutants import RECORD
from torch import Tensor


def trial(dtype: str) -> Trial:
    return Trial(RECORD, Case(samples()[0], dtype), "cpu")


def product(inputs: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Activations in a dtype and a matrix in float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(7, inputs, generator=generator).to(dtype), torch.randn(16, inputs, generator=generator) * 0.1


@given(inputs=st.sampled_from([16, 256, 2048]), seed=st.integers(0, 1000))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rounding_is_within_what_is_allowed(dtype: str, inputs: int, seed: int) -> None:
    tried = trial(dtype)
    x, matrix = product(inputs, seed, tried.dtype)
    got = torch.nn.functional.linear(x, matrix.to(tried.dtype))
    assert off(tried, got, x, matrix) <= 1
    assert off_weight(tried, matrix.to(tried.dtype), matrix) <= 1


@given(seed=st.integers(0, 1000))
@pytest.mark.parametrize(("dtype", "steps"), [("float32", 127), ("float16", 127), ("bfloat16", 15)])
def test_a_lost_zero_point_is_not(dtype: str, steps: int, seed: int) -> None:
    """Every weight off by one code of 8 bits, which bfloat16 hides in products, or of 4."""
    tried = trial(dtype)
    x, matrix = product(32, seed, tried.dtype)
    wrong = matrix + matrix.abs().amax(1, keepdim=True) / steps
    assert off_weight(tried, wrong.to(tried.dtype), matrix) > 1
    assert off(tried, x @ wrong.to(tried.dtype).T, x, matrix) > 1


@given(seed=st.integers(0, 1000))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_eight_bit_step_in_one_weight_is_not(dtype: str, seed: int) -> None:
    tried = trial(dtype)
    _, matrix = product(32, seed, tried.dtype)
    wrong = matrix.clone()
    wrong[matrix.abs() < 0.02] += float(matrix.abs().max()) / 127
    assert off_weight(tried, wrong.to(tried.dtype), matrix) > 1


def test_what_was_not_computed_fails() -> None:
    tried = trial("float32")
    x, matrix = product(32, 0, tried.dtype)
    got = x @ matrix.T
    got[2, 3] = float("nan")
    assert off(tried, got, x, matrix) > 1
    assert off_weight(tried, matrix * float("nan"), matrix) > 1


@pytest.mark.parametrize("sample", samples(), ids=str)
def test_checkpoints_have_the_sizes_that_they_say(sample: QuantSample, tmp_path: Path) -> None:
    checkpoint = draw(sample, Shape(plain=frozenset([DOWN])))
    assert {module: tuple(matrix.shape) for module, matrix in checkpoint.matrices.items()} == sizes_of(
        checkpoint.config
    )
    assert torch.equal(checkpoint.tensors[f"{DOWN}.weight"], checkpoint.matrices[DOWN])
    source = open_source(checkpoint.write(tmp_path))
    assert set(source.names()) == set(checkpoint.tensors)
    assert all(torch.equal(source.load(name).data, tensor) for name, tensor in checkpoint.tensors.items())
    source.close()


def test_a_tied_checkpoint_holds_the_matrix_once() -> None:
    checkpoint = draw(samples()[0], Shape(tied=True))
    assert not any(name.startswith("lm_head") for name in checkpoint.tensors)
    assert torch.equal(checkpoint.matrices["lm_head"], checkpoint.matrices["model.embed_tokens"])


def test_every_tensor_of_a_module_is_once_missing_and_once_renamed() -> None:
    checkpoint = draw(samples()[3], Shape())
    found = [str(fault) for fault in name_faults(checkpoint, (DOWN,))]
    names = ["codes", "scales", "zeros", "g_idx", "part_scale"]
    assert sum("missing" in text for text in found) == sum("renamed" in text for text in found) == len(names)
    assert len(found) == 2 * len(names) + 1


def test_every_dtype_and_every_sample_is_tried() -> None:
    cases = all_cases(RECORD, Settings())
    assert {case.dtype for case in cases} == set(RECORD.dtypes)
    assert [case for case in cases if case.dtype == "float32"] == exact_cases(RECORD)
    one = replace(RECORD, samples=lambda: samples()[:1], dtypes=("float32", "float16", "bfloat16"))
    assert {case.dtype for case in all_cases(one, Settings())} == set(one.dtypes)
    assert all_cases(replace(RECORD, samples=None), Settings()) == []


def test_settings_are_broken_one_at_a_time_and_also_nested() -> None:
    config = {"quant_method": "grid", "sym": True, "inner": {"bits": 4, "format": "packed"}}
    broken = broken_settings(Case(replace(samples()[0], config=config), "float32"))
    assert [(b.key, dict(b.config)["inner"]) for b in broken[1:]] == [
        ("bits", {"bits": -7, "format": "packed"}),
        ("format", {"bits": 4, "format": "enginebay-unknown"}),
    ]
    assert "enginebay_unknown_setting" in dict(broken[0].config)


@pytest.mark.parametrize(("changes", "message"), [({"tolerance": 0.2}, "tolerance"), ({"in_unit": 0}, "one weight")])
def test_a_sample_may_not_state_what_would_hide_faults(changes: dict[str, float], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        replace(samples()[0], **changes)  # type: ignore[arg-type]
