"""The quant bay: how a checkpoint's encoded weights become matrix products.

A `Quantizer` reads the checkpoint's quantization settings and gives each layer a method; a method says which tensors
it keeps (`WeightSpec`) and how to compute with them. It writes no loader and no tensor-parallel code: sharding, fusing
(QKV, gate-up), tied embeddings and strict consumption are the core's, driven by the specs. Plain weights go the same
way: they are a method too.

Words: a *logical* size counts weights, a *stored* size counts elements of the tensor in the checkpoint, which stand for
`Axis.unit` weights each along an axis (packed words, scales of a group, scales of a block). A *part* is one of the
checkpoint's matrices that a fused layer holds side by side, such as q, k and v.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from enginebay.errors import ModelError, WeightsError
from enginebay.plugins.records import NoOptions

if TYPE_CHECKING:
    from pydantic import BaseModel

    from enginebay.loading.source import RawTensor

#: ``"embedding"`` may be tied and serve as the head too; ``"head"`` only yields logits
LayerKind = Literal["linear", "embedding", "head", "norm"]
AxisName = Literal["out", "in"]
Fuse = Literal["concat", "stack", "separate"]
Uneven = Literal["pad", "refuse"]


@dataclass(frozen=True)
class Shard:
    """A rank's share of an axis: elements ``[start, stop)`` of `total`. Elements from `total` on are zero padding."""

    start: int
    stop: int
    total: int

    @classmethod
    def whole(cls, size: int) -> Shard:
        """All of an axis."""
        return cls(0, size, size)

    @property
    def size(self) -> int:
        """Elements on this rank, padding included."""
        return self.stop - self.start

    @property
    def filled(self) -> int:
        """Elements on this rank that the checkpoint fills."""
        return max(0, min(self.stop, self.total) - self.start)

    def stored(self, unit: int, uneven: Uneven = "refuse") -> Shard:
        """Count in stored elements of `unit` weights each.

        Where the shard begins or ends inside a unit, ``"pad"`` keeps every unit that it touches (so the method finds
        its first weight at offset ``start % unit``), and ``"refuse"`` raises.

        Raises
        ------
        ValueError
            The shard cuts a unit, and `uneven` is ``"refuse"``.
        """
        if uneven == "refuse" and (self.start % unit or self.stop % unit or self.total % unit):
            raise ValueError(f"[{self.start}, {self.stop}) of {self.total} is not in whole units of {unit}")
        return Shard(self.start // unit, -(-self.stop // unit), -(-self.total // unit))


@dataclass(frozen=True)
class Part:
    """One matrix of the checkpoint within a layer."""

    #: its name beside its siblings (``q_proj``); empty where the layer is one matrix
    name: str
    #: the rows (output features; vocabulary for an embedding) that this rank holds of it
    out: Shard


@dataclass(frozen=True, kw_only=True)
class LayerInfo:
    """A layer's frozen facts on this rank."""

    #: the layer's path as the checkpoint spells it; for fused parts, beside them: ``model.layers.0.self_attn.qkv_proj``
    name: str
    kind: LayerKind
    parts: tuple[Part, ...]
    #: input features (the row length for an embedding) that this rank holds
    input: Shard
    #: compute dtype
    dtype: torch.dtype

    @property
    def in_features(self) -> int:
        """Input features on this rank."""
        return self.input.size

    @property
    def out_features(self) -> int:
        """Output features on this rank, over all parts."""
        return sum(part.out.size for part in self.parts)

    @property
    def checkpoint_names(self) -> tuple[str, ...]:
        """The checkpoint's module name of each part; what ``modules_to_not_convert`` lists."""
        parent, dot, _ = self.name.rpartition(".")
        return tuple(f"{parent}{dot}{part.name}" if part.name else self.name for part in self.parts)

    def shard(self, axis: AxisName, part: Part) -> Shard:
        """What this rank holds of `part` along `axis`, in weights."""
        return part.out if axis == "out" else self.input


@dataclass(frozen=True)
class Axis:
    """An axis of a stored tensor, and how many weights along it one stored element stands for."""

    name: AxisName
    unit: int = 1
    #: False: every rank keeps the axis whole, such as the scales of groups that weights belong to in any order (C53)
    split: bool = True


@dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """A tensor that a method keeps for each part of a layer, as it stands in the checkpoint."""

    #: from slowest to fastest; empty for a scalar a part
    axes: tuple[Axis, ...]
    dtype: torch.dtype
    #: how parts are kept: one after another along ``out``, along a new first axis, or as ``{name}_{part}`` each
    fuse: Fuse = "concat"
    #: what to do where a rank's shard cuts a unit; see `Shard.stored`
    uneven: Uneven = "refuse"

    def shards(self, layer: LayerInfo, part: Part) -> tuple[Shard, ...]:
        """What this rank holds of the part's tensor along each axis, in stored elements.

        Raises
        ------
        ModelError
            A shard cuts a unit and the spec refuses that.
        """
        out = []
        for axis in self.axes:
            held = layer.shard(axis.name, part)
            try:
                out.append((held if axis.split else Shard.whole(held.total)).stored(axis.unit, self.uneven))
            except ValueError as error:
                raise ModelError(
                    f"{layer.name}: this rank's share of the {axis.name} axis cuts a quantization unit: {error}; "
                    "use a smaller parallel.tensor"
                ) from error
        return tuple(out)

    def shape(self, layer: LayerInfo, part: Part) -> tuple[int, ...]:
        """The part's stored shape on this rank."""
        return tuple(shard.size for shard in self.shards(layer, part))

    def checkpoint_shape(self, layer: LayerInfo, part: Part) -> tuple[int, ...]:
        """The part's stored shape in the checkpoint."""
        return tuple(shard.total for shard in self.shards(layer, part))


class LinearMethod(ABC):
    """How a linear layer keeps and applies its weights, which `layer` holds as parameters of their names."""

    #: on CPU: whether `apply` computes with torch operators and `enginebay.kernels` alone, so that a step's kernel calls may
    #: be recorded and run again (`enginebay.kernels.cpu.recording`)
    replayable: bool = False

    @abstractmethod
    def weights(self, layer: LayerInfo) -> dict[str, WeightSpec]:
        """The tensors to load, by the last segment of their checkpoint name. The bias is the core's."""

    def finish_loading(self, layer: nn.Module) -> None:  # noqa: B027 - nothing to do is a valid answer
        """Rearrange what was loaded, once, before the first step."""

    @abstractmethod
    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x [T, in]`` to ``[T, out]``, both in the compute dtype. It must be capturable in a CUDA graph."""

    def dense_weight(self, layer: nn.Module) -> Tensor:
        """The matrix ``[out, in]`` in the compute dtype, for parts that need it as such (MLA's absorption).

        Raises
        ------
        ModelError
            The method cannot produce it; the default.
        """
        raise ModelError(f"{type(self).__name__} cannot give the dense weight of {getattr(layer, 'name', 'a layer')}")


class EmbeddingMethod(ABC):
    """How a token embedding or an output head keeps its rows; a tied one serves as both."""

    #: on CPU: whether `logits` computes with torch operators and `enginebay.kernels` alone, so that a step's kernel calls may
    #: be recorded and run again (`enginebay.kernels.cpu.recording`)
    replayable: bool = False

    @abstractmethod
    def weights(self, layer: LayerInfo) -> dict[str, WeightSpec]:
        """The tensors to load; ``out`` is the vocabulary, ``in`` the row length."""

    def finish_loading(self, layer: nn.Module) -> None:  # noqa: B027 - nothing to do is a valid answer
        """Rearrange what was loaded, once, before the first step."""

    @abstractmethod
    def embed(self, layer: nn.Module, ids: Tensor) -> Tensor:
        """Rows of this rank: ids int64 ``[T]`` within ``[0, out)`` to ``[T, in]`` in the compute dtype."""

    @abstractmethod
    def logits(self, layer: nn.Module, x: Tensor) -> Tensor:
        """``x [L, in]`` to this rank's logits ``[L, out]`` in the compute dtype."""


@dataclass(frozen=True, kw_only=True)
class QuantContext:
    """What a quantizer's factory is given."""

    #: the checkpoint's ``quantization_config``; empty where the file format itself encodes (GGUF)
    quantization_config: Mapping[str, Any]
    #: compute dtype
    dtype: torch.dtype
    options: BaseModel = field(default_factory=NoOptions)


class Quantizer(ABC):
    """One checkpoint's quantization."""

    @classmethod
    @abstractmethod
    def from_checkpoint(cls, context: QuantContext) -> Quantizer:
        """Read the settings. Raises `ModelError` for any setting that it does not honour."""

    def method_for(self, layer: LayerInfo) -> LinearMethod | EmbeddingMethod | None:
        """A layer's `LinearMethod`, or `EmbeddingMethod` for embedding and head; None (default): plain."""
        return None

    def decode(self, raw: RawTensor, dtype: torch.dtype) -> Tensor:
        """Turn an encoded tensor (`RawTensor.encoding`) into a plain one of ``raw.shape`` in `dtype`.

        Raises
        ------
        WeightsError
            The encoding is not one that this quantizer reads; the default for all.
        """
        raise WeightsError(f"{raw.name}: {type(self).__name__} does not read the encoding {raw.encoding!r}")
