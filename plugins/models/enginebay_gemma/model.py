"""Gemma 3: the shared decoder with norms on both sides of attention and MLP, and sliding layers that rotate apart.

Its norms scale by one plus their weight, its embeddings are scaled up, and each layer type has a rotary base of its own.
"""

from __future__ import annotations

from typing import Any

from enginebay.errors import ModelError
from enginebay.interfaces.model import Build
from enginebay.layers.decoder import DecoderLM, DecoderOptions, layer_windows


class Gemma3ForCausalLM(DecoderLM):
    """Gemma 3 text models. `config` is a transformers ``Gemma3TextConfig``.

    Raises
    ------
    ModelError
        The configuration asks for attention to later tokens.
    """

    def __init__(self, config: Any, build: Build) -> None:
        if config.use_bidirectional_attention:
            raise ModelError(
                "use_bidirectional_attention is not supported: a decoder's tokens see none after them; "
                "such a checkpoint embeds texts and does not generate"
            )
        options = DecoderOptions(
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm=True,
            unit_offset_norms=True,
            post_norms=True,
            activation_field="hidden_activation",
            windows=layer_windows(config),
            rope_by_layer_type=True,
            attention_scale=config.query_pre_attn_scalar**-0.5,
            attention_cap=config.attn_logit_softcapping,
            logit_cap=config.final_logit_softcapping,
            embedding_scale=config.hidden_size**0.5,
        )
        super().__init__(config, build, options)
