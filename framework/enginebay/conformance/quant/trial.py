"""Loads checkpoints by the engine's own door, for one rank of several, and says how far a result may be from float32."""

from __future__ import annotations

import functools
import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from enginebay.conformance.quant.cases import Case
from enginebay.conformance.quant.checkpoint import Checkpoint, Shape, draw
from enginebay.errors import PluginError
from enginebay.interfaces.batch import torch_dtype
from enginebay.interfaces.quant import LayerInfo, QuantContext, Quantizer
from enginebay.layers.build import ModelBuilder
from enginebay.layers.decoder import DecoderLM, DecoderOptions
from enginebay.layers.embedding import VocabEmbedding
from enginebay.layers.linear import Linear
from enginebay.layers.parallel import SingleRank
from enginebay.loading.load_model import load_weights
from enginebay.loading.open_source import open_source
from enginebay.plugins.records import QuantRecord

#: tokens of a batch: one, an odd few, and a prefill's
BATCHES = (1, 7, 32)
#: rounding of a float32 sum of some thousand terms one after another, and of a weight that a float32 formula gives
_SUM, _FORMULA = 2.0**-18, 2.0**-20


class Layers:
    """A loaded decoder's layers on one rank.

    Collectives do nothing, so that each layer gives this rank's own share of a result.
    """

    def __init__(self, model: DecoderLM) -> None:
        layer: Any = model.layers[0]
        self.qkv: Linear = layer.self_attn.qkv_proj
        self.output: Linear = layer.self_attn.o_proj
        self.gate_up: Linear = layer.mlp.gate_up_proj
        self.down: Linear = layer.mlp.down_proj
        self.embedding: VocabEmbedding = model.embed_tokens
        self.head: VocabEmbedding = model.lm_head

    @property
    def linear(self) -> tuple[Linear, ...]:
        """Every linear layer."""
        return (self.qkv, self.output, self.gate_up, self.down)


@dataclass(frozen=True)
class Trial:
    """A case on one device."""

    record: QuantRecord
    case: Case
    device: str

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return torch_dtype(self.case.dtype)

    def quantizer(self, config: Mapping[str, Any] | None = None) -> Quantizer:
        """The record's own, of the sample's settings or of others, by way of JSON as a checkpoint's go."""
        settings = json.loads(json.dumps(dict(self.case.sample.config if config is None else config)))
        made = self.record.factory(
            QuantContext(quantization_config=settings, dtype=self.dtype, options=self.record.options())
        )
        if not isinstance(made, Quantizer):
            raise PluginError(f"the factory of quantizer {self.record.name!r} returned {made!r}, no Quantizer")
        return made

    def build(
        self, checkpoint: Checkpoint, quantizer: Quantizer, rank: int = 0, world: int = 1, device: str = ""
    ) -> DecoderLM:
        """The decoder, unfilled."""
        build = ModelBuilder(
            dtype=self.dtype,
            device=device or self.device,
            max_model_len=64,
            rank=rank,
            world=world,
            comm=SingleRank(),
            quantizer=quantizer,
        )
        return DecoderLM(checkpoint.config, build, DecoderOptions(output_bias=True))

    def load(
        self, checkpoint: Checkpoint, rank: int = 0, world: int = 1, config: Mapping[str, Any] | None = None
    ) -> Layers:
        """Write the checkpoint, open it, and fill a decoder from it."""
        quantizer = self.quantizer(config)
        model = self.build(checkpoint, quantizer, rank, world)
        with tempfile.TemporaryDirectory(prefix="enginebay-quant-") as folder:
            source = open_source(checkpoint.write(Path(folder)))
            try:
                load_weights(model, source, quantizer)
            finally:
                source.close()
        return Layers(model.eval())

    def batch(self, layer: Linear | VocabEmbedding, tokens: int, seed: int = 0) -> Tensor:
        """Random activations ``[tokens, in]`` for a layer on this rank."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(tokens, layer.info.in_features, generator=generator).to(self.device, self.dtype)


@functools.lru_cache(maxsize=128)
def loaded(trial: Trial, shape: Shape = Shape(), rank: int = 0, world: int = 1) -> tuple[Checkpoint, Layers]:  # noqa: B008
    """A checkpoint and a decoder with it, made once for all laws."""
    checkpoint = draw(trial.case.sample, shape)
    return checkpoint, trial.load(checkpoint, rank, world)


def held(info: LayerInfo, matrices: Mapping[str, Tensor]) -> Tensor:
    """Float32 ``[out, in]``: what a layer's rank holds of its modules' matrices, padding rows as zeros."""
    pieces = []
    for name, part in zip(info.checkpoint_names, info.parts, strict=True):
        piece = matrices[name][part.out.start : part.out.start + part.out.filled, info.input.start : info.input.stop]
        pieces.append(torch.nn.functional.pad(piece, (0, 0, 0, part.out.size - part.out.filled)))
    return torch.cat(pieces)


def off(trial: Trial, got: Tensor, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> float:
    """The largest error of a product ``x @ matrix.T + bias`` as a share of what is allowed: above 1 is a failure.

    Allowed is what rounding explains: one unit of the dtype in the result, and of the root of the terms' summed squares twice
    that, some six times the deviation that independent roundings of weights and scales make; and what the sample states. NaN
    counts as infinite.
    """
    found, terms, weights = got.double().cpu(), x.double().cpu(), matrix.double()
    want = terms @ weights.T + (0 if bias is None else bias.double())
    unit = max(torch.finfo(trial.dtype).eps, _SUM)
    spread = (terms.square() @ weights.square().T).sqrt()
    allowed = unit * (want.abs() + 2 * spread) + trial.case.sample.tolerance * spread + 1e-30
    return _worst((found - want).abs() / allowed)


def off_weight(trial: Trial, got: Tensor, matrix: Tensor) -> float:
    """The largest error of single weights ``[out, in]`` as a share of one rounding to the compute dtype.

    The formula itself may be computed in float32, whose error is a share of the row's largest weight.
    """
    want = matrix.double()
    allowed = torch.finfo(trial.dtype).eps * want.abs() + _FORMULA * want.abs().amax(1, keepdim=True) + 1e-30
    return _worst((got.double().cpu() - want).abs() / allowed)


def _worst(shares: Tensor) -> float:
    worst = float(shares.max()) if shares.numel() else 0.0
    return math.inf if math.isnan(worst) else worst
