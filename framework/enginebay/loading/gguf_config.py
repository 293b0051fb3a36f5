"""A Hugging Face configuration out of a GGUF file's metadata.

It goes beyond transformers' reader in what that drops: rotary scaling, llama's biases, and Gemma's attention scale.
What the metadata says and cannot be honoured is refused. Architectures: those of `enginebay.loading.gguf_source`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from enginebay.errors import ModelError
from enginebay.loading.gguf_header import GGUFHeader

#: tensor of rotary factors, one a pair of dimensions; see `_llama3_scaling`
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class _Family:
    """How an architecture is called by Hugging Face."""

    model_type: str
    architecture: str


_FAMILIES = {
    "llama": _Family("llama", "LlamaForCausalLM"),
    "qwen2": _Family("qwen2", "Qwen2ForCausalLM"),
    "qwen3": _Family("qwen3", "Qwen3ForCausalLM"),
    "gemma3": _Family("gemma3_text", "Gemma3ForCausalLM"),
}
#: layers of the largest Gemma 3, whose attention scale follows the hidden size instead of the head
_GEMMA3_27B_LAYERS = 62


def config_dict(header: GGUFHeader) -> dict[str, Any]:
    """Fields of the Hugging Face configuration, ``model_type`` and ``architectures`` included.

    Raises
    ------
    ModelError
        The architecture is not known here, a key is missing, or the file states what cannot be honoured.
    """
    if header.architecture not in _FAMILIES:
        raise ModelError(
            f"{header.path} is of the GGUF architecture {header.architecture!r}; those that can be read are "
            f"{', '.join(_FAMILIES)}"
        )
    if header.get("expert_count", 0):
        raise ModelError(f"{header.path} is a mixture of experts, which cannot be read from GGUF yet")
    family = _FAMILIES[header.architecture]
    num_heads = header.require("attention.head_count")
    hidden_size = header.require("embedding_length")
    head_dim = header.get("attention.key_length") or header.get("rope.dimension_count") or hidden_size // num_heads
    if header.get("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{header.path} turns {header.get('rope.dimension_count')} of {head_dim} head dimensions only")
    fields: dict[str, Any] = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "vocab_size": _vocab_size(header),
        "hidden_size": hidden_size,
        "intermediate_size": header.require("feed_forward_length"),
        "num_hidden_layers": header.require("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": header.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": header.require("context_length"),
        "rms_norm_eps": _shortest(header.require("attention.layer_norm_rms_epsilon")),
        # llama.cpp writes the head only where it is not the embedding
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": header.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    for key in ("intermediate_size", "num_attention_heads", "num_key_value_heads"):
        if not isinstance(fields[key], int):
            raise ModelError(f"{header.path} states {key} layer by layer; only equal layers can be read from GGUF")
    if header.architecture == "gemma3":
        return fields | _gemma3(header, fields)
    if header.architecture == "llama":
        fields["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
        fields["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    theta = float(header.get("rope.freq_base", 10000.0))
    return fields | {"rope_parameters": {"rope_theta": theta, **_scaling(header, theta, head_dim)}}


def _vocab_size(header: GGUFHeader) -> int:
    """Rows of the embedding: what the model computes, whatever the tokenizer has."""
    try:
        return header.tensors["token_embd.weight"].shape[0]
    except KeyError:
        raise ModelError(f"{header.path} has no token_embd.weight, so it is not a language model") from None


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _gemma3(header: GGUFHeader, fields: dict[str, Any]) -> dict[str, Any]:
    """Gemma's own fields: two kinds of layers with a rotary embedding each."""
    theta = float(header.get("rope.freq_base", 1_000_000.0))
    largest = fields["num_hidden_layers"] == _GEMMA3_27B_LAYERS
    return {
        "sliding_window": header.require("attention.sliding_window"),
        "query_pre_attn_scalar": (
            fields["hidden_size"] // fields["num_attention_heads"] if largest else fields["head_dim"]
        ),
        "rope_parameters": {
            "full_attention": {"rope_theta": theta, **_scaling(header, theta, fields["head_dim"])},
            # not in the metadata: every Gemma 3 has this base, without scaling, in its sliding layers
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    }


def _scaling(header: GGUFHeader, theta: float, head_dim: int) -> dict[str, Any]:
    """Rotary scaling as ``rope_parameters`` has it (C59: declared scaling is honoured or refused)."""
    if _ROPE_FACTORS in header.tensors:
        return _llama3_scaling(header, theta, head_dim)
    kind = header.get("rope.scaling.type", "none")
    factor = float(header.get("rope.scaling.factor", 1.0))
    if kind == "none" or factor == 1.0:
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    original = header.get("rope.scaling.original_context_length")
    if kind == "yarn" and original is not None:
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ModelError(f"{header.path} states rotary scaling {kind!r}, which cannot be read from GGUF")


def _llama3_scaling(header: GGUFHeader, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3.1's scaling, which GGUF stores as one factor a frequency instead of its four numbers.

    The largest factor is one of the four; the others are Llama 3.1's own for every model known. They are taken if they
    give the stored factors again, and the file is refused otherwise.
    """
    info = header.tensors[_ROPE_FACTORS]
    stored = np.fromfile(header.path, dtype=np.float32, count=math.prod(info.shape), offset=info.offset)
    factor = float(stored.max())
    if info.type == "F32" and stored.shape == (head_dim // 2,):
        if factor == 1.0 and stored.min() == 1.0:
            return {"rope_type": "default"}
        settings = {
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        if np.allclose(_llama3_factors(theta, head_dim, factor), stored, rtol=1e-3):
            return {"rope_type": "llama3", **settings}
    raise ModelError(f"{header.path}: {_ROPE_FACTORS} are not the factors of Llama 3.1's rotary scaling")


def _llama3_factors(theta: float, head_dim: int, factor: float) -> npt.NDArray[np.float64]:
    """Divisors of the rotary frequencies, ``[head_dim / 2]``: 1 for fast ones to `factor` for slow ones, smoothly."""
    low, high, original = 1.0, 4.0, 8192.0
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    factors: npt.NDArray[np.float64] = 1.0 / ((1.0 - smooth) / factor + smooth)
    return factors
