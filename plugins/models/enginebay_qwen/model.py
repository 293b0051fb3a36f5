"""Qwen3: the shared decoder with norms on queries and keys, and sliding windows in some layers where configured."""

from __future__ import annotations

from typing import Any

from enginebay.errors import ModelError
from enginebay.interfaces.model import Build
from enginebay.layers.decoder import DecoderLM, DecoderOptions


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


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """Each layer's sliding window in tokens, or None.

    ``use_sliding_window: false`` makes every layer full, whatever ``layer_types`` and ``sliding_window`` say;
    transformers has folded ``max_window_layers`` into ``layer_types`` already.

    Raises
    ------
    ModelError
        A layer type is not known, or a sliding layer has no window.
    """
    windows: list[int | None] = []
    for index, layer_type in enumerate(config.layer_types):
        if layer_type not in ("full_attention", "sliding_attention"):
            raise ModelError(
                f"layer_types[{index}] {layer_type!r} is not supported; full_attention, sliding_attention are"
            )
        sliding = layer_type == "sliding_attention" and config.use_sliding_window
        if sliding and config.sliding_window is None:
            raise ModelError(f"layer_types[{index}] is sliding_attention, but sliding_window is not set")
        windows.append(config.sliding_window if sliding else None)
    return tuple(windows)
