"""The fused kernels equal their torch twins: under Triton's interpreter here, compiled where there is a GPU.

bfloat16 is left to the GPU: the interpreter computes it wrongly, without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from enginebay.kernels import activation as twins
from enginebay.kernels import norm as norm_twin
from enginebay.kernels import rope_cache as rope_cache_twin
from enginebay.kernels import triton as chosen
from enginebay.kernels.kv_write import FP8_MAX
from torch import Tensor

pytest.importorskip("triton")
from enginebay.kernels.triton import activation, norm, rope_cache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.float32] + ([torch.bfloat16] if DEVICE == "cuda" else [])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def torch_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twins must not be what they are compared with."""
    monkeypatch.setattr(chosen, "usable", lambda *tensors: False)


def close(got: Tensor, wanted: Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


# --- norms -----------------------------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("width", [64, 576, 1000, 4096])
@pytest.mark.parametrize("wide_weight", [False, True])
def test_rms_norm(dtype: torch.dtype, width: int, wide_weight: bool) -> None:
    x = random(3, width, dtype=dtype) * 7
    weight = random(width, dtype=torch.float32 if wide_weight else dtype, seed=1)
    got = norm.rms_norm(x, None, weight, 1e-5)
    assert got.dtype == dtype
    close(got, norm_twin.rms_norm(x, weight, 1e-5))


@dtypes
@pytest.mark.parametrize("shape", [(1, 576), (5, 64), (2, 3, 1000)])
def test_add_rms_norm_changes_the_residual_as_its_twin_does(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1) * 5
    weight = random(shape[-1], dtype=dtype, seed=2)
    theirs = residual.clone()
    got = norm.rms_norm(x, residual, weight, 1e-6)
    wanted = norm_twin.add_rms_norm(x, theirs, weight, 1e-6)
    assert torch.equal(residual, theirs)
    close(got, wanted)


# --- activations -----------------------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("width", [16, 96, 2048, 3000])
@pytest.mark.parametrize(
    ("name", "twin"), [("silu", twins.silu_mul), ("gelu", twins.gelu_mul), ("gelu_tanh", twins.gelu_tanh_mul)]
)
def test_gated_activation(dtype: torch.dtype, width: int, name: str, twin: Callable[[Tensor], Tensor]) -> None:
    gate_up = random(3, 2 * width, dtype=dtype) * 4
    gate_up[0, 0], gate_up[0, 1] = -60.0, 60.0  # where exponentials leave their range
    close(activation.gated(gate_up, name), twin(gate_up))


# --- norms, rotation and cache ---------------------------------------------------------------------------------------


def attention_inputs(
    dtype: torch.dtype, head_dim: int, rotated: int, hnd: bool, kv_dtype: torch.dtype
) -> dict[str, Any]:
    heads, kv_heads, tokens, block = 3, 2, 6, 4
    qkv = random(tokens, (heads + 2 * kv_heads) * head_dim + 8, dtype=dtype)
    cache = torch.zeros(5, 2, block, kv_heads, head_dim, device=DEVICE)
    if hnd:
        cache = cache.transpose(2, 3).contiguous().transpose(2, 3)
    angles = torch.rand(40, rotated // 2, generator=torch.Generator().manual_seed(3)) * 6
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).to(DEVICE, dtype)
    return {
        # a slice of wider rows, as a fused projection may hand out
        "states": qkv[:, :-8].view(tokens, heads + 2 * kv_heads, head_dim),
        "num_heads": heads,
        "positions": torch.tensor([0, 39, 7, 8, 2, 3], device=DEVICE),
        "table": table if rotated else None,
        "cache": cache.to(kv_dtype),
        "slot_mapping": torch.tensor([4, 19, -1, 7, 8, 5], device=DEVICE),
    }


def check_rope_and_cache(inputs: dict[str, Any], **rest: Any) -> None:
    theirs = {**inputs, "states": inputs["states"].clone(), "cache": inputs["cache"].clone()}
    given = {"q_norm": None, "k_norm": None, "k_scale": 1.0, "v_scale": 1.0} | rest
    rope_cache.rope_and_cache(**inputs, **given)
    rope_cache_twin.rope_and_cache(**theirs, **given)
    # keys and values are the cache's: what is left of them here is no one's
    queries = slice(inputs["num_heads"])
    close(inputs["states"][:, queries], theirs["states"][:, queries])
    # block 0 has no meaning: the twin sends there what is not to be written
    mine, wanted = inputs["cache"][1:].float(), theirs["cache"][1:].float()
    step = 0.07 if inputs["cache"].dtype.itemsize == 1 else TOLERANCE[inputs["states"].dtype]
    torch.testing.assert_close(mine, wanted, rtol=step, atol=step)
    assert not inputs["cache"][0].float().any()


@dtypes
@pytest.mark.parametrize("hnd", [False, True])
@pytest.mark.parametrize(("head_dim", "rotated"), [(16, 16), (24, 24), (32, 8), (16, 0)])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_cache(dtype: torch.dtype, hnd: bool, head_dim: int, rotated: int, normed: bool) -> None:
    inputs = attention_inputs(dtype, head_dim, rotated, hnd, dtype)
    norms = {}
    if normed:
        # one in the compute dtype, one as a unit-offset norm keeps it
        norms["q_norm"] = (random(head_dim, dtype=dtype, seed=4), 1e-5)
        norms["k_norm"] = (random(head_dim, dtype=torch.float32, seed=5), 1e-6)
    check_rope_and_cache(inputs, **norms)


def test_a_norm_of_queries_alone() -> None:
    inputs = attention_inputs(torch.float32, 16, 16, False, torch.float32)
    check_rope_and_cache(inputs, q_norm=(random(16, dtype=torch.float32, seed=4), 1e-5))


def test_a_cache_whose_heads_are_not_contiguous_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = attention_inputs(torch.float32, 16, 16, False, torch.float32)
    theirs = {**inputs, "states": inputs["states"].clone(), "cache": inputs["cache"].clone()}
    rope_cache_twin.rope_and_cache(**theirs)
    monkeypatch.setattr(chosen, "usable", lambda *tensors: True)
    inputs["cache"] = inputs["cache"].transpose(3, 4).contiguous().transpose(3, 4)
    rope_cache_twin.rope_and_cache(**inputs)
    close(inputs["cache"][1:], theirs["cache"][1:])


@pytest.mark.gpu  # the interpreter rounds to fp8 in another way
@dtypes
@pytest.mark.parametrize("hnd", [False, True])
def test_an_fp8_cache_is_scaled_and_clamped(dtype: torch.dtype, hnd: bool) -> None:
    inputs = attention_inputs(dtype, 16, 16, hnd, torch.float8_e4m3fn)
    inputs["states"][0] *= 100.0
    check_rope_and_cache(inputs, k_scale=0.25, v_scale=0.04)
    assert float(inputs["cache"].float().abs().max()) == FP8_MAX
