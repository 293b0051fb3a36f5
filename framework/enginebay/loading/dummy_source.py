"""Random weights of given shapes, for benchmarks and tests: no file is read. It knows no model beyond its shapes.

A tensor depends on the seed and on its own name only, not on what was drawn before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch

from enginebay.errors import WeightsError
from enginebay.loading.source import RawTensor

Shapes = Mapping[str, tuple[int, ...]]


class DummySource:
    """A `WeightSource` that draws its tensors.

    Matrices are normal with mean 0, biases are 0, and a norm's weights are 1.

    Parameters
    ----------
    shapes
        Tensor name -> shape, or a function that returns it, asked at the first use.
    dtype, device
        Of the tensors. Drawing on the target's device spares a copy and is far faster on a GPU.
    seed
        Equal seeds, devices and dtypes give equal weights.
    std
        Standard deviation of matrices: the configuration's ``initializer_range``.
    """

    def __init__(
        self,
        shapes: Shapes | Callable[[], Shapes],
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        seed: int = 0,
        std: float = 0.02,
    ) -> None:
        self._given = shapes
        self._known: Shapes | None = None
        self._dtype = dtype
        self._device = torch.device(device)
        self._seed = seed
        self._std = std

    def names(self) -> list[str]:
        """Every tensor of the shapes."""
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """The given shape."""
        try:
            return tuple(self._shapes[name])
        except KeyError:
            raise WeightsError(f"no shape is given for {name}, so it cannot be drawn") from None

    def load(self, name: str) -> RawTensor:
        """Draw one tensor."""
        shape = self.shape(name)
        data = torch.empty(shape, dtype=self._dtype, device=self._device)
        owner, _, last = name.rpartition(".")
        if last == "bias":
            data.zero_()
        elif owner.endswith("norm"):
            data.fill_(1.0)
        else:
            data.normal_(0.0, self._std, generator=self._generator(name))
        return RawTensor(name=name, shape=shape, data=data)

    def close(self) -> None:
        """Nothing is held."""

    @property
    def _shapes(self) -> Shapes:
        if self._known is None:
            self._known = self._given() if callable(self._given) else self._given
        return self._known

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        # 63 bits: torch takes a signed integer
        return torch.Generator(self._device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
