"""Families read from GGUF: a tiny model written as llama.cpp's converter writes it has transformers' logits.

The files' metadata becomes the configuration, so that this also shows a setting that is lost on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import enginebay_gemma
import enginebay_llama
import enginebay_qwen
import gguf
import pytest
import torch
import transformers
from enginebay.interfaces.model import CausalLM, ModelContext
from enginebay.loading.gguf_source import ARCHITECTURES, GGUFSource
from enginebay.loading.hf_config import load_hf_config
from enginebay.models.reference import resolve_model
from torch import Tensor

IDS = [3, 17, 91, 5, 44, 8, 60, 2, 33]
LAYERS = 7  # Gemma's sixth layer is full


@dataclass(frozen=True)
class Family:
    """A GGUF architecture, and what transformers calls it."""

    make: Callable[[ModelContext], CausalLM]
    config_class: Any
    hf_class: Any
    changes: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "llama": Family(enginebay_llama.make, transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": Family(enginebay_qwen.make_qwen2, transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": Family(enginebay_qwen.make_qwen3, transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "gemma3": Family(
        enginebay_gemma.make,
        transformers.Gemma3TextConfig,
        transformers.Gemma3ForCausalLM,
        {"sliding_window": 3, "query_pre_attn_scalar": 16},
    ),
}


def hf_model(family: Family, *, tied: bool) -> Any:
    torch.manual_seed(0)
    fields: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "tie_word_embeddings": tied,
    }
    model = family.hf_class(family.config_class(**(fields | family.changes))).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases of 0 and scales of 1 would hide whether they are read
            parameter.data.add_(torch.randn(parameter.shape) * 0.2)
    return model


def permuted(rows: Tensor, heads: int) -> Tensor:
    """A llama projection in llama.cpp's rotary order."""
    return rows.view(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def write(path: Path, architecture: str, model: Any) -> None:
    """The model as llama.cpp's converter writes it, without a tokenizer."""
    conf = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(conf.max_position_embeddings)
    writer.add_embedding_length(conf.hidden_size)
    writer.add_block_count(conf.num_hidden_layers)
    writer.add_feed_forward_length(conf.intermediate_size)
    writer.add_head_count(conf.num_attention_heads)
    writer.add_head_count_kv(conf.num_key_value_heads)
    writer.add_key_length(conf.head_dim)
    writer.add_value_length(conf.head_dim)
    writer.add_layer_norm_rms_eps(conf.rms_norm_eps)
    parameters = conf.rope_parameters
    writer.add_rope_freq_base(parameters.get("full_attention", parameters)["rope_theta"])
    if architecture == "gemma3":
        writer.add_sliding_window(conf.sliding_window)
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], conf.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and conf.tie_word_embeddings:
            continue
        data = tensor.detach()
        if architecture == "gemma3" and name.endswith("norm.weight"):
            data = data + 1
        if architecture == "llama" and ".q_proj." in name:
            data = permuted(data, conf.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            data = permuted(data, conf.num_key_value_heads)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), data.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_logits_equal_the_model_that_was_written(tmp_path: Path, model_lab: Any, architecture: str, tied: bool) -> None:
    """C52, C59."""
    family = FAMILIES[architecture]
    hf = hf_model(family, tied=tied)
    path = tmp_path / "tiny.gguf"
    write(path, architecture, hf)
    source = GGUFSource(path)
    tensors = {name: source.load(name).data for name in source.names()}
    source.close()
    conf = load_hf_config(resolve_model(str(path)))
    assert conf.architectures == [family.hf_class.__name__]
    lab = model_lab(family.make)
    got = lab.runner(conf, tensors).step({0: IDS})
    torch.testing.assert_close(got, lab.reference(hf, IDS), rtol=1e-4, atol=1e-4)


def test_every_readable_architecture_is_tested() -> None:
    assert FAMILIES.keys() == ARCHITECTURES.keys()
