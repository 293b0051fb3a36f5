"""Checkpoints of a sample: a small decoder's weights, encoded, and what they mean; written as a checkpoint is.

The decoder has Llama's names, one layer, and sizes that are few of the sample's units. Parts of a fused layer differ in
magnitude, so that no part's scale can pass for another's. It knows no quantizer.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from enginebay.interfaces.quant import LayerKind
from enginebay.interfaces.quant_sample import QuantSample
from enginebay.models.reference import ModelFiles

LAYER = "model.layers.0"
DOWN = f"{LAYER}.mlp.down_proj"
OUTPUT = f"{LAYER}.self_attn.o_proj"
QUERY = f"{LAYER}.self_attn.q_proj"
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
#: standard deviation of each module's weights
MAGNITUDES = {
    QUERY: 0.1,
    f"{LAYER}.self_attn.k_proj": 0.8,
    f"{LAYER}.self_attn.v_proj": 0.02,
    OUTPUT: 0.1,
    f"{LAYER}.mlp.gate_proj": 0.05,
    f"{LAYER}.mlp.up_proj": 0.4,
    DOWN: 0.1,
    EMBEDDING: 0.5,
    HEAD: 0.1,
}
#: vocabulary, where units allow it: no multiple of 64, and rows for the last of four ranks
_VOCABULARY = 200


@dataclass(frozen=True)
class Shape:
    """What a checkpoint is made as."""

    #: the head shares the embedding's matrix
    tied: bool = False
    #: the MLP's width is three units, so that two ranks cut the middle one
    uneven: bool = False
    #: modules that stand plain, whole names
    plain: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, and each module's matrix, float32 ``[out, in]``, by module."""

    sample: QuantSample
    config: LlamaConfig
    tensors: Mapping[str, Tensor]
    matrices: Mapping[str, Tensor]

    def write(self, folder: Path) -> ModelFiles:
        """Write the file that such a checkpoint is."""
        if self.sample.gguf_type is not None:
            from enginebay.conformance.quant.gguf_file import write_gguf

            write_gguf(folder / "model.gguf", self.tensors, self.sample.gguf_type)
            return ModelFiles(kind="gguf", path=folder, gguf_file="model.gguf", name="sample")
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, folder / "model.safetensors")
        return ModelFiles(kind="hf_dir", path=folder, name="sample")


def unit_of(sample: QuantSample) -> int:
    """Weights that every size is a multiple of."""
    return math.lcm(sample.in_unit, sample.out_unit, 16)


def config_of(sample: QuantSample, shape: Shape) -> LlamaConfig:
    """Sizes that one, two and four ranks share in whole units, an `uneven` width aside."""
    unit = unit_of(sample)
    rows = -(-_VOCABULARY // sample.out_unit) * sample.out_unit if sample.out_unit < 64 else 4 * sample.out_unit
    return LlamaConfig(
        vocab_size=rows,
        hidden_size=2 * unit,
        intermediate_size=3 * math.lcm(sample.in_unit, sample.out_unit, 2) if shape.uneven else 4 * unit,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=unit,
        max_position_embeddings=64,
        tie_word_embeddings=shape.tied,
    )


def sizes_of(config: LlamaConfig) -> dict[str, tuple[int, int]]:
    """``(out, in)`` of each module."""
    hidden, width = config.hidden_size, config.intermediate_size
    heads, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    outs = {QUERY: heads, f"{LAYER}.self_attn.k_proj": kv, f"{LAYER}.self_attn.v_proj": kv, OUTPUT: hidden}
    outs |= {f"{LAYER}.mlp.gate_proj": width, f"{LAYER}.mlp.up_proj": width, DOWN: hidden}
    outs |= {EMBEDDING: config.vocab_size} | ({} if config.tie_word_embeddings else {HEAD: config.vocab_size})
    return {module: (out, {OUTPUT: heads, DOWN: width}.get(module, hidden)) for module, out in outs.items()}


def kind_of(module: str) -> LayerKind:
    """The kind of layer that a module is."""
    return {EMBEDDING: "embedding", HEAD: "head"}.get(module, "linear")  # type: ignore[return-value]


@functools.lru_cache(maxsize=64)
def draw(sample: QuantSample, shape: Shape) -> Checkpoint:
    """A random checkpoint; equal arguments give one object."""
    config = config_of(sample, shape)
    tensors: dict[str, Tensor] = {}
    matrices: dict[str, Tensor] = {}
    for module, size in sizes_of(config).items():
        generator = torch.Generator().manual_seed(zlib.crc32(module.encode()))
        weight = torch.randn(size, generator=generator) * MAGNITUDES[module]
        if kind_of(module) not in sample.layers or module in shape.plain:
            tensors[f"{module}.weight"] = matrices[module] = weight
            continue
        encoded = dict(sample.encode(weight.clone()))
        tensors |= {f"{module}.{name}": tensor for name, tensor in encoded.items()}
        matrices[module] = sample.dequantize(encoded)
    if shape.tied:
        matrices[HEAD] = matrices[EMBEDDING]
    for norm in ("model.norm", f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm"):
        tensors[f"{norm}.weight"] = torch.ones(config.hidden_size)
    tensors[f"{OUTPUT}.bias"] = torch.randn(config.hidden_size, generator=torch.Generator().manual_seed(1))
    return Checkpoint(sample, config, tensors, matrices)
