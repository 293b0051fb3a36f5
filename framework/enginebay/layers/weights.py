"""The base of every layer with weights: makes parameters from specs, and says where each checkpoint tensor goes.

It knows sharding and fusing; it knows no file format and no arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from enginebay.errors import ModelError
from enginebay.interfaces.quant import LayerInfo, Shard, WeightSpec


@dataclass(frozen=True)
class WeightTarget:
    """Where one checkpoint tensor goes on this rank."""

    #: the checkpoint's module path, before the model's `WeightMap`
    module: str
    #: the last segment of the tensor's name
    weight: str
    #: the tensor's shape in the checkpoint
    shape: tuple[int, ...]
    #: what this rank keeps of it, by axis
    shards: tuple[Shard, ...]
    #: the part of a parameter that it fills, in the kept shape
    destination: Tensor

    def fill(self, tensor: Tensor) -> None:
        """Copy this rank's share of a whole checkpoint tensor, converting dtype and device; padding becomes zero."""
        source, destination = tensor.reshape(self.shape), self.destination
        if any(shard.filled != shard.size for shard in self.shards):
            destination.zero_()
        for axis, shard in enumerate(self.shards):
            if shard.filled == 0:
                return
            source = source.narrow(axis, shard.start, shard.filled)
            destination = destination.narrow(axis, 0, shard.filled)
        destination.copy_(source)


class WeightModule(nn.Module):
    """A layer whose parameters are declared by `WeightSpec`s."""

    def __init__(self, info: LayerInfo, device: torch.device) -> None:
        super().__init__()
        self.info = info
        self._device = device
        self._finished = False
        self._specs: dict[str, WeightSpec] = {}

    @property
    def name(self) -> str:
        """The layer's path as the checkpoint spells it."""
        return self.info.name

    def add_weight(self, name: str, spec: WeightSpec) -> None:
        """Create the (unfilled) parameters of `spec`.

        Raises
        ------
        ModelError
            The spec cannot be sharded or fused for this layer.
        """
        shapes = [spec.shape(self.info, part) for part in self.info.parts]
        if len(shapes) > 1 and spec.fuse == "separate":
            for part, shape in zip(self.info.parts, shapes, strict=True):
                self._new_parameter(f"{name}_{part.name}", shape, spec.dtype)
        elif len(shapes) > 1 and spec.fuse == "stack":
            if len(set(shapes)) > 1:
                raise ModelError(f"{self.name}.{name}: parts of unequal shapes {shapes} cannot be stacked")
            self._new_parameter(name, (len(shapes), *shapes[0]), spec.dtype)
        elif len(shapes) > 1:
            axis = self._out_axis(name, spec)
            joined = sum(shape[axis] for shape in shapes)
            self._new_parameter(name, (*shapes[0][:axis], joined, *shapes[0][axis + 1 :]), spec.dtype)
        else:
            self._new_parameter(name, shapes[0], spec.dtype)
        self._specs[name] = spec

    def targets(self) -> Iterator[WeightTarget]:
        """Where each of the layer's checkpoint tensors goes.

        Raises
        ------
        ModelError
            The layer is loaded already: its parameters may have been packed.
        """
        if self._finished:
            raise ModelError(f"{self.name} is loaded already; build the model anew to load other weights")
        parts = self.info.parts
        for weight, spec in self._specs.items():
            offset = 0
            for index, (part, module) in enumerate(zip(parts, self.info.checkpoint_names, strict=True)):
                shards = spec.shards(self.info, part)
                if len(parts) == 1:
                    destination = self.get_parameter(weight).data
                elif spec.fuse == "separate":
                    destination = self.get_parameter(f"{weight}_{part.name}").data
                elif spec.fuse == "stack":
                    destination = self.get_parameter(weight).data[index]
                else:
                    axis = self._out_axis(weight, spec)
                    destination = self.get_parameter(weight).data.narrow(axis, offset, shards[axis].size)
                    offset += shards[axis].size
                shape = tuple(shard.total for shard in shards)
                yield WeightTarget(module, weight, shape, shards, destination)

    def finish_loading(self) -> None:
        """Rearrange what was loaded. After it the layer takes no more weights."""
        self._rearrange()
        self._finished = True

    def _rearrange(self) -> None:
        """What a kind of layer does once its weights are there; nothing by default."""

    def _new_parameter(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if hasattr(self, name):
            raise ModelError(f"{self.name}: a weight may not be called {name!r}, a name that the layer uses itself")
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def _out_axis(self, name: str, spec: WeightSpec) -> int:
        for index, axis in enumerate(spec.axes):
            if axis.name == "out":
                return index
        raise ModelError(f"{self.name}.{name}: parts without an out axis cannot be concatenated; use stack or separate")
