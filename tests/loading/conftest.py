"""A small model, its checkpoint, and a quantizer that keeps int8 rows: the second method beside the plain one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from enginebay.interfaces.model import CausalLM
from enginebay.interfaces.quant import (
    Axis,
    EmbeddingMethod,
    LayerInfo,
    LinearMethod,
    QuantContext,
    Quantizer,
    WeightSpec,
)
from enginebay.layers.build import ModelBuilder
from enginebay.layers.decoder import DecoderLM, DecoderOptions
from enginebay.loading.source import RawTensor
from torch import Tensor, nn


def int8_weights(layer: LayerInfo) -> dict[str, WeightSpec]:
    return {
        "weight": WeightSpec(axes=(Axis("out"), Axis("in")), dtype=torch.int8),
        "weight_scale": WeightSpec(axes=(Axis("out"),), dtype=torch.float32),
    }


class Int8Linear(LinearMethod):
    def weights(self, layer: LayerInfo) -> dict[str, WeightSpec]:
        return int8_weights(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(x, self.dense_weight(layer), bias)

    def dense_weight(self, layer: nn.Module) -> Tensor:
        return layer.get_parameter("weight").float() * layer.get_parameter("weight_scale")[:, None]


class Int8Embedding(EmbeddingMethod):
    def weights(self, layer: LayerInfo) -> dict[str, WeightSpec]:
        return int8_weights(layer)

    def embed(self, layer: nn.Module, ids: Tensor) -> Tensor:
        return layer.get_parameter("weight")[ids].float() * layer.get_parameter("weight_scale")[ids, None]

    def logits(self, layer: nn.Module, x: Tensor) -> Tensor:
        return (x @ layer.get_parameter("weight").float().T) * layer.get_parameter("weight_scale")


class Int8(Quantizer):
    """Linear layers and embeddings in int8 with a scale a row; decodes the encoding ``test:negated``."""

    @classmethod
    def from_checkpoint(cls, context: QuantContext) -> Int8:
        return cls()

    def method_for(self, layer: LayerInfo) -> LinearMethod | EmbeddingMethod | None:
        return Int8Linear() if layer.kind == "linear" else Int8Embedding()


class Negated(Quantizer):
    """Plain layers; tensors encoded with the wrong sign."""

    @classmethod
    def from_checkpoint(cls, context: QuantContext) -> Negated:
        return cls()

    def decode(self, raw: RawTensor, dtype: torch.dtype) -> Tensor:
        return raw.data.neg().to(dtype)


@dataclass
class MemorySource:
    """A checkpoint in memory that counts what is read; names in `negated` come encoded."""

    tensors: dict[str, Tensor]
    negated: set[str] = field(default_factory=set)
    reads: list[str] = field(default_factory=list)

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def load(self, name: str) -> RawTensor:
        self.reads.append(name)
        if name in self.negated:
            return RawTensor(name, self.shape(name), self.tensors[name].neg(), "test:negated")
        return RawTensor(name, self.shape(name), self.tensors[name])

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Lab:
    """Makes models and checkpoints of one small shape."""

    int8: Int8 = field(default_factory=Int8)
    negated: Negated = field(default_factory=Negated)
    source: Callable[..., MemorySource] = MemorySource

    def model(self, *, tied: bool = False, quantizer: Quantizer | None = None, **place: Any) -> CausalLM:
        config = transformers.LlamaConfig(
            vocab_size=70,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )
        build = ModelBuilder(dtype=torch.float32, device="cpu", max_model_len=32, quantizer=quantizer, **place)
        return DecoderLM(config, build, DecoderOptions(qkv_bias=True))

    def checkpoint(self, shapes: dict[str, tuple[int, ...]], *, int8: bool = False) -> dict[str, Tensor]:
        """Random tensors of the given names and shapes."""
        generator = torch.Generator().manual_seed(0)
        out = {}
        for name, shape in shapes.items():
            if (int8 and name.endswith("proj.weight")) or (
                int8 and name in ("lm_head.weight", "model.embed_tokens.weight")
            ):
                out[name] = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
            else:
                out[name] = torch.rand(shape, generator=generator) + 0.1
        return out


@pytest.fixture
def lab() -> Lab:
    """Models, checkpoints and quantizers of one small shape."""
    return Lab()
