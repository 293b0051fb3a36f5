"""Samples of what the GGUF quantizer reads, for the conformance suite."""

from __future__ import annotations

from collections.abc import Mapping

import gguf
import torch
from enginebay.interfaces.quant_sample import QuantSample
from torch import Tensor

from enginebay_gguf.block_formats import FILLS, MEANINGS


def samples() -> list[QuantSample]:
    """A file for each type that is common in published ones and encoded: F32, F16 and BF16 are read plain."""
    return [_sample(name) for name in MEANINGS]


def _sample(name: str) -> QuantSample:
    kind = gguf.GGMLQuantizationType[name]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]

    def encode(weight: Tensor) -> Mapping[str, Tensor]:
        if name in FILLS:
            return {"weight": FILLS[name](weight.reshape(-1, block)).view(len(weight), -1)}
        return {"weight": torch.from_numpy(gguf.quantize(weight.numpy(), kind)).view(torch.uint8)}

    def dequantize(tensors: Mapping[str, Tensor]) -> Tensor:
        rows = tensors["weight"]
        return MEANINGS[name](rows.reshape(-1, block_bytes)).view(len(rows), -1)

    return QuantSample(
        name=name,
        config={"quant_method": "gguf"},
        encode=encode,
        dequantize=dequantize,
        layers=("linear", "embedding", "head"),
        in_unit=block,
        gguf_type=name,
    )
