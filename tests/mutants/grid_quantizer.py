"""A quantizer with much that quantizers have, and its samples: what the mutants of the quant bay are broken copies of.

Settings: ``bits`` 4 (two codes a byte, along the inputs) or 8; blocks of ``block_rows`` outputs and ``group_size`` inputs with
a scale, and a zero point unless ``sym``; with ``act_order`` a group's inputs stand anywhere (``g_idx``) and each matrix has a
scale of its own besides. Each step is a method, so that one can be replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from enginebay.errors import ModelError
from enginebay.interfaces.quant import (
    Axis,
    EmbeddingMethod,
    LayerInfo,
    LinearMethod,
    Part,
    QuantContext,
    Quantizer,
    Uneven,
    WeightSpec,
)
from enginebay.interfaces.quant_sample import QuantSample
from torch import Tensor, nn
from torch.nn import functional

KEYS = {"quant_method", "bits", "group_size", "block_rows", "sym", "act_order", "modules_to_not_convert"}


class Codes:
    """Which tensors a layer of these settings has, and its matrix."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.bits: int = config["bits"]
        self.group: int = config["group_size"]
        self.rows: int = config["block_rows"]
        self.sym, self.act_order = config["sym"], config["act_order"]

    def weights(self, layer: LayerInfo) -> dict[str, WeightSpec]:
        uneven: Uneven = "pad" if self.bits == 8 else "refuse"
        blocks = (Axis("out", self.rows), Axis("in", self.group, split=not self.act_order))
        found = {
            "codes": WeightSpec(axes=(Axis("out"), Axis("in", 8 // self.bits)), dtype=torch.uint8),
            "scales": WeightSpec(axes=blocks, dtype=torch.float32, uneven=uneven),
        }
        if not self.sym:
            found["zeros"] = WeightSpec(axes=blocks, dtype=torch.uint8, uneven=uneven)
        if self.act_order:
            found["g_idx"] = WeightSpec(axes=(Axis("in"),), dtype=torch.int32, fuse="separate")
            found["part_scale"] = WeightSpec(axes=(), dtype=torch.float32, fuse="stack")
        return found

    def matrix(self, layer: Any) -> Tensor:
        """Float32 ``[out, in]``."""
        return (self.codes(layer) - self.zeros(layer)) * self.scales(layer)

    def codes(self, layer: Any) -> Tensor:
        packed: Tensor = layer.codes
        return (packed if self.bits == 8 else self.unpacked(packed)).float()

    def unpacked(self, packed: Tensor) -> Tensor:
        return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)

    def zeros(self, layer: Any) -> Tensor:
        if self.sym:
            return torch.tensor(float(2 ** (self.bits - 1)))
        return self.spread(layer.zeros.float(), layer)

    def scales(self, layer: Any) -> Tensor:
        found = self.spread(layer.scales, layer)
        return found * self.part_scales(layer)[:, None] if self.act_order else found

    def part_scales(self, layer: Any) -> Tensor:
        """``[out]``."""
        scales: Tensor = layer.part_scale.reshape(-1)
        return scales.repeat_interleave(torch.tensor([part.out.size for part in layer.info.parts]))

    def spread(self, groups: Tensor, layer: Any) -> Tensor:
        """``[blocks, groups]`` to ``[out, in]``."""
        first, parts = 0, []
        for part in layer.info.parts:
            rows = first + (self.row_offset(part) + torch.arange(part.out.size)) // self.rows
            parts.append(groups[rows][:, self.group_of_input(layer, part.name)])
            first += part.out.stored(self.rows, "pad").size
        return torch.cat(parts)

    def row_offset(self, part: Part) -> int:
        """Where this rank's first output of a part stands in its block."""
        return part.out.start % self.rows

    def group_of_input(self, layer: Any, part: str) -> Tensor:
        """Int64 ``[in]``."""
        if self.act_order:
            index: Tensor = layer.g_idx if len(layer.info.parts) == 1 else getattr(layer, f"g_idx_{part}")
            return index.long()
        inputs = torch.arange(layer.info.input.size)
        return (self.offset(layer) + inputs) // self.group

    def offset(self, layer: Any) -> int:
        """Where this rank's first input stands in its group."""
        return int(layer.info.input.start % self.group)


class GridLinear(LinearMethod):
    def __init__(self, codes: Codes) -> None:
        self.codes = codes

    def weights(self, layer: LayerInfo) -> dict[str, WeightSpec]:
        return self.codes.weights(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, self.codes.matrix(layer).to(x.dtype), bias)

    def dense_weight(self, layer: nn.Module) -> Tensor:
        info: Any = layer.info
        return self.codes.matrix(layer).to(info.dtype)


class GridEmbedding(EmbeddingMethod):
    def __init__(self, codes: Codes) -> None:
        self.codes = codes

    def weights(self, layer: LayerInfo) -> dict[str, WeightSpec]:
        return self.codes.weights(layer)

    def embed(self, layer: nn.Module, ids: Tensor) -> Tensor:
        info: Any = layer.info
        return self.codes.matrix(layer)[ids].to(info.dtype)

    def logits(self, layer: nn.Module, x: Tensor) -> Tensor:
        return functional.linear(x, self.codes.matrix(layer).to(x.dtype))


class Grid(Quantizer):
    """Linear layers, embedding and head."""

    codes: type[Codes] = Codes
    linear: type[GridLinear] = GridLinear
    embedding: type[GridEmbedding] = GridEmbedding

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.skipped = tuple(config.get("modules_to_not_convert", ()))

    @classmethod
    def from_checkpoint(cls, context: QuantContext) -> Grid:
        config = context.quantization_config
        cls.check(config)
        return cls(config)

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        if unknown := sorted(config.keys() - KEYS):
            raise ModelError(f"unknown settings: {', '.join(unknown)}")
        cls.check_bits(config)
        for key in ("group_size", "block_rows"):
            if config[key] < 1:
                raise ModelError(f"{key} {config[key]} is no size")

    @classmethod
    def check_bits(cls, config: Mapping[str, Any]) -> None:
        if config["bits"] not in (4, 8):
            raise ModelError(f"bits {config['bits']} are not supported; 4 and 8 are")

    def method_for(self, layer: LayerInfo) -> LinearMethod | EmbeddingMethod | None:
        if self.is_skipped(layer):
            return None
        codes = self.codes(self.config)
        return self.linear(codes) if layer.kind == "linear" else self.embedding(codes)

    def is_skipped(self, layer: LayerInfo) -> bool:
        found = {self.names(module) for module in layer.checkpoint_names}
        if len(found) > 1:
            raise ModelError(f"{layer.name}: modules_to_not_convert names some of {layer.checkpoint_names}, not all")
        return found.pop()

    def names(self, module: str) -> bool:
        return any(module == entry or module.startswith(f"{entry}.") for entry in self.skipped)


# --- samples ---------------------------------------------------------------------------------------------------------


def sample(
    name: str, bits: int, group: int, *, rows: int = 1, sym: bool = True, act_order: bool = False
) -> QuantSample:
    """Checkpoints of these settings."""
    top, middle = 2**bits - 1, 2 ** (bits - 1)

    def encode(weight: Tensor) -> dict[str, Tensor]:
        outputs, inputs = weight.shape
        part = weight.abs().amax() if act_order else torch.tensor(1.0)
        order = weight.abs().sum(0).argsort() if act_order else torch.arange(inputs)
        blocks = (weight / part)[:, order].view(outputs // rows, rows, -1, group)
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        scales = blocks.abs().amax((1, 3)) / (middle - 1) if sym else (high - low) / top
        zeros = torch.full_like(low, middle) if sym else (-low / scales).round().clamp(0, top)
        codes = (blocks / scales[:, None, :, None] + zeros[:, None, :, None]).round().clamp(0, top).to(torch.uint8)
        place = order.argsort()
        codes = codes.view(outputs, inputs)[:, place]
        found = {"codes": codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4, "scales": scales}
        found |= {} if sym else {"zeros": zeros.to(torch.uint8)}
        return found | ({"g_idx": (place // group).int(), "part_scale": part} if act_order else {})

    def dequantize(tensors: Mapping[str, Tensor]) -> Tensor:
        codes = tensors["codes"]
        if bits == 4:
            codes = codes.repeat_interleave(2, 1) >> torch.tensor([0, 4], dtype=torch.uint8).repeat(codes.shape[1]) & 15
        groups = tensors["g_idx"].long() if act_order else torch.arange(codes.shape[1]) // group
        zeros, scales = tensors.get("zeros", torch.full_like(tensors["scales"], middle)), tensors["scales"]
        zeros, scales = (x.float().repeat_interleave(rows, 0)[:, groups] for x in (zeros, scales))
        return (codes.float() - zeros) * scales * tensors.get("part_scale", torch.tensor(1.0))

    return QuantSample(
        name=name,
        config={
            "quant_method": "grid",
            "bits": bits,
            "group_size": group,
            "block_rows": rows,
            "sym": sym,
            "act_order": act_order,
        },
        encode=encode,
        dequantize=dequantize,
        layers=("linear", "embedding", "head"),
        in_unit=group,
        out_unit=rows,
        skip_key="modules_to_not_convert",
    )


def samples() -> list[QuantSample]:
    """The grid, thinly."""
    return [
        sample("int8, groups of 16, zero points", 8, 16, sym=False),
        sample("int8, blocks of 16 x 16", 8, 16, rows=16),
        sample("int4, groups of 32, symmetric", 4, 32),
        sample("int4, groups of 16 in any order, part scales", 4, 16, sym=False, act_order=True),
    ]
