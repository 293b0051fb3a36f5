"""The decoder that most language models are: pre-norm, grouped-query attention, gated MLP, one residual stream.

A model plugin gives it the configuration and what differs (`DecoderOptions`). Its layers are
`enginebay.layers.decoder_layer`'s.

Shapes: ``T`` tokens, ``L`` tokens whose logits are wanted, ``d`` model width, ``V`` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from enginebay.errors import ModelError
from enginebay.interfaces.model import Build, CausalLM, WeightMap
from enginebay.layers.decoder_layer import DecoderLayer, DecoderOptions, layer_windows

__all__ = ["DecoderLM", "DecoderOptions", "layer_windows"]


class DecoderLM(CausalLM):
    """Embedding, decoder layers, final norm and head, under the names that Llama's checkpoints use."""

    def __init__(self, config: Any, build: Build, options: DecoderOptions) -> None:
        super().__init__(config, build)
        if options.windows and len(options.windows) != config.num_hidden_layers:
            raise ModelError(f"{len(options.windows)} layer types for {config.num_hidden_layers} layers")
        self._embedding_scale = options.embedding_scale
        self._logit_cap = options.logit_cap
        self.replayable = options.logit_cap is None  # a cap is torch operators behind the head
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embed_tokens = build.embedding("model.embed_tokens", vocab, hidden)
        self.layers.extend(
            DecoderLayer(config, build, options, f"model.layers.{i}", i) for i in range(config.num_hidden_layers)
        )
        self.norm = build.norm("model.norm", hidden, config.rms_norm_eps, unit_offset=options.unit_offset_norms)
        tied = config.tie_word_embeddings
        self.lm_head = build.head("lm_head", vocab, hidden, tied_to=self.embed_tokens if tied else None)
        self.weight_map = WeightMap(
            ignored=("model.layers.*.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
            tied=(("lm_head", "model.embed_tokens"),) if tied else (),
        )

    def embed(self, input_ids: Tensor) -> Tensor:
        """See `CausalLM.embed`."""
        out: Tensor = self.embed_tokens(input_ids)
        if self._embedding_scale is not None:
            out = out * torch.tensor(self._embedding_scale, dtype=out.dtype).item()
        return out

    def forward_layers(
        self, hidden: Tensor, residual: Tensor | None, positions: Tensor, start: int, end: int
    ) -> tuple[Tensor, Tensor]:
        """See `CausalLM.forward_layers`."""
        for layer in self.layers[start:end]:
            hidden, residual = layer(hidden, residual, positions)
        if residual is None:
            raise ModelError(f"no layer in [{start}, {end})")
        return hidden, residual

    def final_norm(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """See `CausalLM.final_norm`."""
        out: Tensor = self.norm(hidden, residual)[0]
        return out

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.compute_logits`."""
        logits = self.lm_head.logits(hidden)
        return logits if self._logit_cap is None else (logits / self._logit_cap).tanh_().mul_(self._logit_cap)
