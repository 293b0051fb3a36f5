"""The model bay: a network in terms of `Build`, cut so that pipeline stages and strict loading can work on it.

A model file holds only the network. It never sees tensor parallelism, quantization, a backend or an adapter: `Build`
makes layers that handle those, and `WeightMap` says how the checkpoint names differ, where they do.

Shapes: ``T`` tokens of a step, ``L`` tokens whose logits are wanted, ``d`` model width, ``V`` vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor, nn

from enginebay.loading.name_map import WeightMap
from enginebay.plugins.records import NoOptions
from enginebay.plugins.requirements import AttentionSpec

if TYPE_CHECKING:
    from pydantic import BaseModel

    from enginebay.layers.attention import Attention
    from enginebay.layers.embedding import VocabEmbedding
    from enginebay.layers.linear import Linear
    from enginebay.layers.norm import RMSNorm
    from enginebay.layers.rotary import Rotary

__all__ = ["Build", "CausalLM", "ModelContext", "Split", "WeightMap"]

#: How ranks share a linear layer: ``"column"`` splits its outputs (which stay split), ``"row"`` its inputs (which come
#: split) and sums the results; None gives every rank the whole matrix.
Split = Literal["column", "row"] | None


class Build(Protocol):
    """Makes a model's layers. All sizes are the whole model's; names are the checkpoint's module paths.

    A fused layer's name stands beside its parts: ``q_proj``, a part of ``model.layers.0.self_attn.qkv_proj``, is
    ``model.layers.0.self_attn.q_proj`` in the checkpoint.
    """

    #: attention layers made so far, in order
    attention_layers: list[Attention]

    def linear(
        self, name: str, in_features: int, out_features: int, *, bias: bool = False, split: Split = None
    ) -> Linear:
        """A matrix ``[out, in]``."""

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
        """Query, key and value projections as one; ranks share KV heads where there are fewer of them."""

    def gate_up(
        self,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        parts: tuple[str, str] = ("gate_proj", "up_proj"),
    ) -> Linear:
        """The two input projections of a gated MLP as one: output ``[gate | up]``, split by columns."""

    def norm(self, name: str, size: int, eps: float, *, unit_offset: bool = False) -> RMSNorm:
        """RMS norm, with or without a residual to add first; `unit_offset` scales by one plus the weight, in float32."""

    def rotary(self, config: Any, layer_type: str | None = None) -> Rotary:
        """The rotary table of a configuration's ``rope_parameters`` (of one layer type, where they are nested)."""

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> VocabEmbedding:
        """Token embedding; its rows are split over ranks."""

    def head(
        self, name: str, vocab_size: int, hidden_size: int, *, tied_to: VocabEmbedding | None = None
    ) -> VocabEmbedding:
        """The output head; `tied_to` itself where the matrix is shared."""

    def attention(
        self,
        spec: AttentionSpec,
        *,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        rope: Rotary | None = None,
        sinks: Tensor | None = None,
    ) -> Attention:
        """An attention layer over the paged cache; `spec` counts the whole model's heads, `sinks` this rank's."""


@dataclass(frozen=True, kw_only=True)
class ModelContext:
    """What a model's factory is given."""

    #: the Hugging Face `PretrainedConfig` of the text model
    config: Any
    build: Build
    options: BaseModel = field(default_factory=NoOptions)


class CausalLM(nn.Module, ABC):
    """A decoder-only language model over flat token batches.

    The residual stream is passed beside the hidden state so that a norm can add and normalise at once: a layer returns
    ``(hidden, residual)`` whose sum is the layer's output.
    """

    #: whether everything after `embed` is made of the layers of `Build` and `enginebay.kernels`, so that on CPU a step's
    #: kernel calls may be recorded and run again (`enginebay.kernels.cpu.recording`)
    replayable: bool = False
    #: how the checkpoint's names differ from the model's; an instance may set its own
    weight_map: WeightMap = WeightMap()

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__()
        self.config = config
        #: attention layers in order; their `spec` says what they ask of the cache
        self.attention_layers: list[Attention] = build.attention_layers
        #: decoder layers, which `forward_layers` runs
        self.layers = nn.ModuleList()

    @abstractmethod
    def embed(self, input_ids: Tensor) -> Tensor:
        """Token ids int64 ``[T]`` to ``[T, d]``."""

    @abstractmethod
    def forward_layers(
        self, hidden: Tensor, residual: Tensor | None, positions: Tensor, start: int, end: int
    ) -> tuple[Tensor, Tensor]:
        """Run layers ``[start, end)``; `residual` is None before the first. Both ``[T, d]``; may work in place."""

    @abstractmethod
    def final_norm(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """Close the residual stream after the last layer: ``[T, d]``, what `compute_logits` takes."""

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Ids and positions int64 ``[T]`` to the final hidden states ``[T, d]``."""
        hidden, residual = self.forward_layers(self.embed(input_ids), None, positions, 0, len(self.layers))
        return self.final_norm(hidden, residual)

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """``[L, d]`` to logits ``[L, V]`` in the compute dtype; rows that only pad the vocabulary are cut."""
