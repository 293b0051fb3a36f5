"""Builds the model of one rank and fills its weights. It knows parts by their factories, not which plugin made them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from enginebay.interfaces.batch import torch_dtype
from enginebay.interfaces.model import CausalLM, ModelContext
from enginebay.interfaces.quant import QuantContext, Quantizer
from enginebay.layers.build import ModelBuilder
from enginebay.loading.dummy_source import DummySource
from enginebay.loading.load_model import expected_tensors, load_weights
from enginebay.loading.open_source import open_source
from enginebay.models.reference import ModelFiles


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """What a model is built from."""

    files: ModelFiles
    #: the Hugging Face configuration
    hf_config: Any
    #: factory of the model's record
    model: Callable[[ModelContext], Any]
    #: factory of the quantizer's record, and its context; None for plain weights
    quant: tuple[Callable[[QuantContext], Any], QuantContext] | None
    dtype: str
    max_model_len: int
    #: draw random weights from this seed instead of reading a checkpoint
    dummy_seed: int | None


def build_model(parts: ModelParts, device: torch.device | str) -> tuple[CausalLM, Quantizer | None]:
    """Build the network on `device`, unfilled; ``meta`` costs nothing and tells what the layers ask for."""
    quantizer = None if parts.quant is None else parts.quant[0](parts.quant[1])
    builder = ModelBuilder(
        dtype=torch_dtype(parts.dtype), device=device, max_model_len=parts.max_model_len, quantizer=quantizer
    )
    model = parts.model(ModelContext(config=parts.hf_config, build=builder))
    assert isinstance(model, CausalLM)
    return model, quantizer


def load_model(parts: ModelParts, device: torch.device) -> CausalLM:
    """Build the network on `device` and fill it from the checkpoint, or with random weights."""
    model, quantizer = build_model(parts, device)
    if parts.dummy_seed is None:
        source = open_source(parts.files)
    else:
        source = DummySource(
            expected_tensors(model),
            dtype=torch_dtype(parts.dtype),
            device=device,
            seed=parts.dummy_seed,
            std=getattr(parts.hf_config, "initializer_range", 0.02),
        )
    try:
        load_weights(model, source, quantizer)
    finally:
        source.close()
    return model.eval()
