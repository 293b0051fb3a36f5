"""Llama: the shared decoder with optional biases. It knows only what sets Llama apart."""

from __future__ import annotations

from typing import Any

from enginebay.interfaces.model import Build
from enginebay.layers.decoder import DecoderLM, DecoderOptions


class LlamaForCausalLM(DecoderLM):
    """Llama 2 and 3, and models of their shape. `config` is a transformers ``LlamaConfig``."""

    def __init__(self, config: Any, build: Build) -> None:
        options = DecoderOptions(
            qkv_bias=config.attention_bias, output_bias=config.attention_bias, mlp_bias=config.mlp_bias
        )
        super().__init__(config, build, options)
