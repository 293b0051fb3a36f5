"""Mistral: the shared decoder, every layer with the one sliding window where there is one."""

from __future__ import annotations

from typing import Any

from enginebay.errors import ModelError
from enginebay.interfaces.model import Build
from enginebay.layers.decoder import DecoderLM, DecoderOptions


class MistralForCausalLM(DecoderLM):
    """Mistral's dense models. `config` is a transformers ``MistralConfig``.

    Raises
    ------
    ModelError
        The configuration has ``layer_types`` that its window does not make of every layer.
    """

    def __init__(self, config: Any, build: Build) -> None:
        kind = "full_attention" if config.sliding_window is None else "sliding_attention"
        if any(layer_type != kind for layer_type in getattr(config, "layer_types", None) or ()):
            raise ModelError(
                f"layer_types with other than {kind} are not supported in MistralForCausalLM, whose layers are alike "
                f"(sliding_window is {config.sliding_window}); a checkpoint with mixed layers is of another architecture"
            )
        super().__init__(config, build, DecoderOptions(windows=(config.sliding_window,) * config.num_hidden_layers))
