"""`ModelBuilder`: makes a model's layers for one rank, device, dtype and quantizer.

It is the one place that knows all of them, so that a model file knows none. The engine builds a model once on the
``meta`` device to learn what its attention layers ask for, and once for real.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from enginebay.errors import ModelError
from enginebay.interfaces.model import Split
from enginebay.interfaces.quant import EmbeddingMethod, LayerInfo, LinearMethod, Part, Quantizer, Shard
from enginebay.layers.attention import Attention
from enginebay.layers.embedding import PlainEmbedding, VocabEmbedding, vocab_layer
from enginebay.layers.linear import Linear, PlainLinear
from enginebay.layers.norm import RMSNorm
from enginebay.layers.parallel import Communicator, SingleRank, TensorParallel
from enginebay.layers.rotary import Rotary
from enginebay.plugins.requirements import AttentionSpec


class ModelBuilder:
    """Implements `enginebay.interfaces.model.Build`.

    Parameters
    ----------
    dtype
        Compute dtype.
    device
        Where parameters are created, unfilled.
    rank, world, comm
        This rank's place in its tensor-parallel group, and the group's collectives.
    quantizer
        Gives layers their methods; None for plain weights.
    max_model_len
        Positions that rotary tables cover.
    """

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        max_model_len: int,
        rank: int = 0,
        world: int = 1,
        comm: Communicator | None = None,
        quantizer: Quantizer | None = None,
    ) -> None:
        if world > 1 and comm is None:
            raise ModelError(f"a tensor-parallel group of {world} ranks needs a communicator")
        self.dtype = dtype
        self.device = torch.device(device)
        self.max_model_len = max_model_len
        self.parallel = TensorParallel(rank, world, comm or SingleRank())
        self.quantizer = quantizer
        self.attention_layers: list[Attention] = []
        self._rotaries: dict[tuple[int, str | None], tuple[Any, Rotary]] = {}

    def linear(
        self, name: str, in_features: int, out_features: int, *, bias: bool = False, split: Split = None
    ) -> Linear:
        """See `Build.linear`."""
        out, inner = Shard.whole(out_features), Shard.whole(in_features)
        if split == "column":
            out = self.parallel.shard(out_features, f"{name}'s output")
        elif split == "row":
            inner = self.parallel.shard(in_features, f"{name}'s input")
        return self._linear(name, (Part("", out),), inner, bias=bias, split=split)

    def qkv(
        self,
        name: str,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        parts: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj"),
    ) -> Linear:
        """See `Build.qkv`."""
        heads = self.parallel.shard(num_heads, f"{name}'s number of heads")
        first, count = self.parallel.kv_heads(num_kv_heads)
        query = Shard(heads.start * head_dim, heads.stop * head_dim, num_heads * head_dim)
        kv = Shard(first * head_dim, (first + count) * head_dim, num_kv_heads * head_dim)
        named = (Part(parts[0], query), Part(parts[1], kv), Part(parts[2], kv))
        return self._linear(name, named, Shard.whole(hidden_size), bias=bias, split="column")

    def gate_up(
        self,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        parts: tuple[str, str] = ("gate_proj", "up_proj"),
    ) -> Linear:
        """See `Build.gate_up`."""
        out = self.parallel.shard(intermediate_size, f"{name}'s width")
        named = tuple(Part(part, out) for part in parts)
        return self._linear(name, named, Shard.whole(hidden_size), bias=bias, split="column")

    def norm(self, name: str, size: int, eps: float, *, unit_offset: bool = False) -> RMSNorm:
        """See `Build.norm`."""
        return RMSNorm(name, size, eps, self.dtype, self.device, unit_offset=unit_offset)

    def rotary(self, config: Any, layer_type: str | None = None) -> Rotary:
        """See `Build.rotary`; equal arguments give one table."""
        key = (id(config), layer_type)
        if key not in self._rotaries:
            # The configuration is kept with its table: a collected one's id could come back.
            made = Rotary(config, layer_type, self.max_model_len, self.dtype, self.device)
            self._rotaries[key] = (config, made)
        return self._rotaries[key][1]

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> VocabEmbedding:
        """See `Build.embedding`."""
        return self._vocab(name, "embedding", vocab_size, hidden_size)

    def head(
        self, name: str, vocab_size: int, hidden_size: int, *, tied_to: VocabEmbedding | None = None
    ) -> VocabEmbedding:
        """See `Build.head`."""
        if tied_to is None:
            return self._vocab(name, "head", vocab_size, hidden_size)
        tied_to.is_head = True
        return tied_to

    def attention(
        self,
        spec: AttentionSpec,
        *,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        rope: Rotary | None = None,
        sinks: Tensor | None = None,
    ) -> Attention:
        """See `Build.attention`."""
        heads = self.parallel.shard(spec.num_heads, "the number of attention heads").size
        local = replace(spec, num_heads=heads, num_kv_heads=self.parallel.kv_heads(spec.num_kv_heads)[1])
        layer = Attention(len(self.attention_layers), local, q_norm, k_norm, rope, sinks)
        self.attention_layers.append(layer)
        return layer

    def _linear(self, name: str, parts: tuple[Part, ...], inner: Shard, *, bias: bool, split: Split) -> Linear:
        info = LayerInfo(name=name, kind="linear", parts=parts, input=inner, dtype=self.dtype)
        method = self._method(info) or PlainLinear()
        if not isinstance(method, LinearMethod):
            raise ModelError(f"{name}: {type(self.quantizer).__name__} gave a linear layer a {type(method).__name__}")
        summed = split == "row" and self.parallel.world > 1
        return Linear(
            info,
            method,
            self.device,
            bias=bias,
            add_bias=not summed or self.parallel.rank == 0,
            reduce=self.parallel.comm.all_reduce if summed else None,
        )

    def _vocab(
        self, name: str, kind: Literal["embedding", "head"], vocab_size: int, hidden_size: int
    ) -> VocabEmbedding:
        info = vocab_layer(name, kind, vocab_size, hidden_size, self.dtype, self.parallel)
        method = self._method(info) or PlainEmbedding()
        if not isinstance(method, EmbeddingMethod):
            raise ModelError(f"{name}: {type(self.quantizer).__name__} gave the {kind} a {type(method).__name__}")
        return VocabEmbedding(info, method, self.device, self.parallel)

    def _method(self, info: LayerInfo) -> LinearMethod | EmbeddingMethod | None:
        return None if self.quantizer is None else self.quantizer.method_for(info)
