"""Rotary tables against transformers' own rotary module, for every rope type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from enginebay.errors import ModelError
from enginebay.layers.rotary import Rotary, position_limit
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

CPU = torch.device("cpu")
POSITIONS = [0, 1000, 8000, 60000]
LONG = 60001
HALF = 8  # head size 16

TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 8192},
    "yarn_tuned": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "truncate": False,
    },
    "longrope": {
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "short_factor": [1.0 + i / 10 for i in range(HALF)],
        "long_factor": [2.0 + i for i in range(HALF)],
    },
    "llama3": {
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
}


def config(rope: dict[str, Any], length: int = 65536, **changes: Any) -> Any:
    fields = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": length, "rope_parameters": rope}
    return transformers.LlamaConfig(**(fields | changes))


def parameters(name: str) -> dict[str, Any]:
    return {"rope_type": name, "rope_theta": 5000.0} | TYPES[name]


def theirs(conf: Any, positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = LlamaRotaryEmbedding(conf)(torch.zeros(1), torch.tensor([positions]))
    return cos[0], sin[0]


def ours(rotary: Rotary, positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    cos, signed = rotary.table[positions].unbind(1)
    half = rotary.rotary_dim // 2
    return cos, torch.cat((-signed[:, :half], signed[:, half:]), -1)


def test_every_type_of_transformers_is_tested() -> None:
    """C59: a type that a new transformers brings fails here first."""
    assert {parameters(name)["rope_type"] for name in TYPES} == {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize("name", TYPES)
def test_tables_equal_transformers_near_and_far(name: str) -> None:
    """C59."""
    conf = config(parameters(name))
    rotary = Rotary(conf, None, LONG, torch.float32, CPU)
    got, want = ours(rotary, POSITIONS), theirs(conf, POSITIONS)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-7)


def test_types_differ_where_they_should() -> None:
    """The comparison above would also pass if scaling did nothing on either side."""
    tables = [Rotary(config(parameters(name)), None, LONG, torch.float32, CPU).table[8000] for name in TYPES]
    plain = tables[0]
    same = [name for name, table in zip(TYPES, tables, strict=True) if torch.allclose(table, plain)]
    assert same == ["default", "dynamic"]  # dynamic has no effect within its own length


@pytest.mark.parametrize("name", ["default", "yarn_tuned", "proportional"])
def test_rotation_equals_transformers(name: str) -> None:
    conf = config(parameters(name))
    torch.manual_seed(0)
    positions = [5, 8000, 59999]
    states = torch.randn(3, 6, 16)  # 4 query heads, 1 key head, 1 value head
    query, key = states[:, :4].clone(), states[:, 4:5].clone()
    want_q, want_k = apply_rotary_pos_emb(query, key, *theirs(conf, positions), unsqueeze_dim=1)
    value = states[:, 5:].clone()
    Rotary(conf, None, LONG, torch.float32, CPU)(states[:, :5], torch.tensor(positions))
    torch.testing.assert_close(states[:, :4], want_q)
    torch.testing.assert_close(states[:, 4:5], want_k)
    assert torch.equal(states[:, 5:], value)


def test_partial_rotation_leaves_the_rest() -> None:
    rotary = Rotary(config({"rope_type": "default", "partial_rotary_factor": 0.5}), None, 64, torch.float32, CPU)
    states = torch.randn(2, 3, 16)
    before = states.clone()
    rotary(states, torch.tensor([7, 9]))
    assert rotary.rotary_dim == 8
    assert torch.equal(states[..., 8:], before[..., 8:])
    assert not torch.equal(states[..., :8], before[..., :8])


def test_nested_parameters_by_layer_type_equal_transformers() -> None:
    conf = transformers.Gemma3TextConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=16,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        },
    )
    reference = Gemma3RotaryEmbedding(conf)
    for layer_type in conf.layer_types:
        rotary = Rotary(conf, layer_type, LONG, torch.float32, CPU)
        cos, sin = reference(torch.zeros(1), torch.tensor([POSITIONS]), layer_type)
        torch.testing.assert_close(ours(rotary, POSITIONS), (cos[0], sin[0]), rtol=0, atol=2e-7)
    with pytest.raises(ModelError, match=r"rope_parameters\.chunked is missing"):
        Rotary(conf, "chunked", 64, torch.float32, CPU)


def test_longrope_chooses_its_factors_by_max_model_len() -> None:
    conf = config(parameters("longrope"))
    short, long = (Rotary(conf, None, length, torch.float32, CPU) for length in (4096, 4097))
    torch.testing.assert_close(ours(short, [1000]), theirs(conf, [1000]), rtol=0, atol=2e-7)
    cos, sin = theirs(conf, [1000, 60000])  # 60000 makes transformers take the long factors too
    torch.testing.assert_close(ours(long, [1000]), (cos[:1], sin[:1]), rtol=0, atol=2e-7)


@pytest.mark.parametrize(
    ("name", "limit"),
    [("default", 1024), ("linear", 4096), ("dynamic", 1024), ("yarn", 65536), ("longrope", 1024), ("llama3", 1024)],
)
def test_positions_past_the_table_are_refused_at_start(name: str, limit: int) -> None:
    """C60."""
    conf = config(parameters(name), length=1024)
    assert position_limit(conf) == limit
    assert Rotary(conf, None, limit, torch.bfloat16, torch.device("meta")).table.shape == (limit, 2, 16)
    with pytest.raises(ModelError, match=f"max_model_len {limit + 1} is beyond"):
        Rotary(conf, None, limit + 1, torch.bfloat16, torch.device("meta"))


@pytest.mark.parametrize(
    ("rope", "match"),
    [
        ({"rope_type": "linear", "factor": 2.0, "facter": 3.0}, r"rope_parameters\.facter.*did you mean factor"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fsat": 3.0}, r"rope_parameters\.beta_fsat.*did you mean beta_fast"),
        ({"rope_type": "default", "factor": 2.0}, r"rope_parameters\.factor: unknown key for rope type 'default'"),
        ({"rope_type": "cubic"}, "rope_type 'cubic' is not supported; supported: default"),
    ],
)
def test_a_misspelt_parameter_is_refused(rope: dict[str, Any], match: str) -> None:
    """C60."""
    with pytest.raises(ModelError, match=match):
        Rotary(config(rope), None, 64, torch.float32, CPU)


def test_a_missing_parameter_is_refused() -> None:
    conf = config(parameters("llama3"))
    del conf.rope_parameters["low_freq_factor"]
    with pytest.raises(ModelError, match="rope type 'llama3' needs low_freq_factor"):
        Rotary(conf, None, 64, torch.float32, CPU)


def test_the_table_is_computed_in_float32_and_kept_in_the_compute_dtype() -> None:
    conf = config(parameters("default"))
    exact, rounded = (Rotary(conf, None, LONG, dtype, CPU).table for dtype in (torch.float32, torch.bfloat16))
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, exact.bfloat16())
