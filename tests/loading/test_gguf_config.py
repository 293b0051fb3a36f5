"""Configurations out of GGUF metadata."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from enginebay.errors import ModelError
from enginebay.loading.gguf_config import config_dict
from enginebay.loading.gguf_header import GGUFHeader, TensorInfo
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

BASE = {
    "block_count": 2,
    "context_length": 4096,
    "embedding_length": 64,
    "feed_forward_length": 128,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "rope.freq_base": 500000.0,
}


def header(architecture: str, tensors: tuple[str, ...] = (), drop: str = "", **more: Any) -> GGUFHeader:
    """A header of `BASE` with changes; keys are written with ``__`` for a dot."""
    keys = BASE | {key.replace("__", "."): value for key, value in more.items()}
    metadata = {f"{architecture}.{key}": value for key, value in keys.items() if key != drop}
    table = {name: TensorInfo(name, (64,), "F32", 0, 256) for name in tensors}
    table["token_embd.weight"] = TensorInfo("token_embd.weight", (96, 64), "F32", 0, 96 * 64 * 4)
    identity = {
        "general.architecture": architecture,
        "tokenizer.ggml.eos_token_id": 7,
        "tokenizer.ggml.bos_token_id": 0,
    }
    return GGUFHeader(Path("m.gguf"), metadata | identity, table)


@pytest.mark.parametrize(
    ("architecture", "model_type", "hf_architecture"),
    [
        ("llama", "llama", "LlamaForCausalLM"),
        ("qwen2", "qwen2", "Qwen2ForCausalLM"),
        ("qwen3", "qwen3", "Qwen3ForCausalLM"),
        ("gemma3", "gemma3_text", "Gemma3ForCausalLM"),
    ],
)
def test_every_family_makes_a_configuration(architecture: str, model_type: str, hf_architecture: str) -> None:
    config = AutoConfig.for_model(**config_dict(header(architecture, attention__sliding_window=512)))
    assert config.model_type == model_type
    assert config.architectures == [hf_architecture]
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (96, 64, 2)
    assert (config.num_key_value_heads, config.head_dim, config.max_position_embeddings) == (2, 16, 4096)
    assert (config.eos_token_id, config.bos_token_id, config.rms_norm_eps) == (7, 0, 1e-05)
    assert config.tie_word_embeddings is True


def test_a_stored_head_is_not_tied() -> None:
    assert config_dict(header("qwen3", ("output.weight",)))["tie_word_embeddings"] is False


def test_head_size_is_the_keys_length() -> None:
    assert config_dict(header("qwen3", attention__key_length=32))["head_dim"] == 32


def test_llama_biases_show_in_the_tensors() -> None:
    plain, biased = config_dict(header("llama")), config_dict(header("llama", ("blk.0.attn_q.bias",)))
    assert (plain["attention_bias"], biased["attention_bias"]) == (False, True)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, {"rope_type": "default"}),
        ({"rope__scaling__type": "none"}, {"rope_type": "default"}),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 32768,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        ),
    ],
)
def test_declared_scaling_is_kept_c59(metadata: dict[str, Any], expected: dict[str, Any]) -> None:
    assert config_dict(header("qwen2", **metadata))["rope_parameters"] == {"rope_theta": 500000.0, **expected}


def test_unknown_scaling_is_refused_c59() -> None:
    with pytest.raises(ModelError, match="rotary scaling 'longrope'"):
        config_dict(header("llama", rope__scaling__type="longrope", rope__scaling__factor=2.0))


def with_factors(path: Path, factors: torch.Tensor) -> GGUFHeader:
    """A llama header whose rotary factors lie in a file."""
    path.write_bytes(b"head" + factors.float().numpy().tobytes())
    base = header("llama", attention__key_length=128)
    info = TensorInfo("rope_freqs.weight", (len(factors),), "F32", 4, 4 * len(factors))
    return replace(base, path=path, tensors=base.tensors | {info.name: info})


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_factors_become_llama3_scaling_c59(tmp_path: Path, factor: float) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        head_dim=128, hidden_size=512, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=rope
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    factors = 500000.0 ** -(torch.arange(0, 128, 2) / 128) / scaled
    found = config_dict(with_factors(tmp_path / "m.gguf", factors))["rope_parameters"]
    assert found == {**rope, "factor": pytest.approx(factor)}


def test_factors_of_one_are_no_scaling(tmp_path: Path) -> None:
    rope = config_dict(with_factors(tmp_path / "m.gguf", torch.ones(64)))["rope_parameters"]
    assert rope == {"rope_theta": 500000.0, "rope_type": "default"}


def test_other_factors_are_refused_c59(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"rope_freqs\.weight are not the factors of Llama 3\.1"):
        config_dict(with_factors(tmp_path / "m.gguf", torch.linspace(1, 8, 64)))


def test_gemma_has_two_rotary_bases_and_scales_only_full_layers() -> None:
    scaling: dict[str, Any] = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
    fields = config_dict(header("gemma3", attention__sliding_window=512, **scaling))
    assert fields["rope_parameters"] == {
        "full_attention": {"rope_theta": 500000.0, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    assert fields["query_pre_attn_scalar"] == fields["head_dim"]


def test_largest_gemma_scales_attention_by_its_hidden_size() -> None:
    changes: dict[str, Any] = {
        "block_count": 62,
        "embedding_length": 5376,
        "attention__head_count": 32,
        "attention__key_length": 128,
    }
    fields = config_dict(header("gemma3", attention__sliding_window=1024, **changes))
    assert fields["query_pre_attn_scalar"] == 168


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba'; those that can be read are llama"),
        ({"expert_count": 8}, "mixture of experts"),
        ({"rope__dimension_count": 8, "attention__key_length": 16}, "turns 8 of 16 head dimensions only"),
        ({"attention__head_count_kv": [1, 2]}, "num_key_value_heads layer by layer"),
        ({"drop": "context_length"}, r"lacks the metadata key llama\.context_length"),
    ],
)
def test_what_cannot_be_honoured_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_dict(header(**{"architecture": "llama", **changes}))


def test_a_file_without_an_embedding() -> None:
    base = header("llama")
    with pytest.raises(ModelError, match=r"no token_embd\.weight"):
        config_dict(replace(base, tensors={}))
