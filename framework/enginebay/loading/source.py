"""A weight source: named tensors of a checkpoint, whatever its file format. It knows no model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(slots=True)
class RawTensor:
    """One tensor as it stands in a checkpoint.

    `data` is the plain tensor of `shape`, or, where `encoding` names one (``"gguf:Q4_1"``), the encoded bytes as uint8
    ``[rows, bytes a row]`` that a `Quantizer` decodes into `shape`.
    """

    name: str
    shape: tuple[int, ...]
    data: Tensor
    encoding: str | None = None


class WeightSource(Protocol):
    """Tensors by Hugging Face name. Implementations read lazily and keep no tensor."""

    def names(self) -> list[str]:
        """Every tensor of the checkpoint, in file order."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape, without reading data."""

    def load(self, name: str) -> RawTensor:
        """Read one tensor. Raises `WeightsError` if the file is truncated or damaged."""

    def close(self) -> None:
        """Release files."""


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Where a plain tensor's bytes lie: `num_bytes` from `offset` on, row-major and little-endian."""

    path: Path
    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@runtime_checkable
class LocatedSource(WeightSource, Protocol):
    """A source whose tensors lie plain in files, so that others may read the bytes their own way."""

    def locate(self, name: str) -> FileSpan:
        """Where a tensor lies, checked against the file's size. Raises `WeightsError` where there is none."""
