"""Qwen2 and Qwen3: the shared decoder with biases or norms on queries and keys, and sliding windows where configured."""

from __future__ import annotations

from typing import Any

from enginebay.interfaces.model import Build
from enginebay.layers.decoder import DecoderLM, DecoderOptions, layer_windows


class Qwen2ForCausalLM(DecoderLM):
    """Qwen2 and Qwen2.5 dense models. `config` is a transformers ``Qwen2Config``."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build, DecoderOptions(qkv_bias=True, windows=layer_windows(config)))


class Qwen3ForCausalLM(DecoderLM):
    """Qwen3 dense models. `config` is a transformers ``Qwen3Config``."""

    def __init__(self, config: Any, build: Build) -> None:
        options = DecoderOptions(
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm=True,
            windows=layer_windows(config),
        )
        super().__init__(config, build, options)
