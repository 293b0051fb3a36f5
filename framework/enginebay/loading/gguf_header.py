"""The header of a GGUF file: metadata and the table of tensors, without their data.

The gguf package's reader makes an array object of every token and every merge, which takes seconds for a vocabulary of
a quarter of a million; here arrays of strings are skipped unless they are asked for. It knows no model.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from enginebay.errors import ModelError, WeightsError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS: dict[int, str] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies in the file, and how it is stored."""

    name: str
    #: logical shape, slowest axis first as in torch
    shape: tuple[int, ...]
    #: name of the storage type, such as ``"Q4_1"``
    type: str
    #: of the data, from the start of the file
    offset: int
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, a run along the last axis."""
        return self.num_bytes // prod(self.shape[:-1])


@dataclass(frozen=True)
class GGUFHeader:
    """What a GGUF file says before its data."""

    path: Path
    #: scalars and arrays by key; an array of strings that was not asked for stands as its length
    metadata: dict[str, Any]
    #: in file order
    tensors: dict[str, TensorInfo]

    @classmethod
    def read(cls, path: Path, string_arrays: Collection[str] = ()) -> GGUFHeader:
        """Parse a file's header. Of the arrays of strings only those with a key in `string_arrays` are kept.

        Raises
        ------
        ModelError
            The file is not a GGUF file that can be read here.
        WeightsError
            It ends before its header or its data does.
        """
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return _Parser(path, view, string_arrays).header()
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise ModelError(f"{path} cannot be read as a GGUF file: {error}") from error
        except (struct.error, IndexError, OverflowError) as error:
            raise WeightsError(f"{path} is truncated or damaged: its header ends early; fetch it again") from error

    @property
    def architecture(self) -> str:
        """``general.architecture``, such as ``"llama"``; empty if the file names none."""
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``<architecture>.<key>``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def require(self, key: str) -> Any:
        """The value of ``<architecture>.<key>``; `ModelError` if the file does not state it."""
        try:
            return self.metadata[f"{self.architecture}.{key}"]
        except KeyError:
            raise ModelError(f"{self.path} lacks the metadata key {self.architecture}.{key}") from None


class _Parser:
    """A cursor over the mapped file."""

    def __init__(self, path: Path, view: mmap.mmap, string_arrays: Collection[str]) -> None:
        self._path = path
        self._view = view
        self._kept = string_arrays
        self._at = 0

    def header(self) -> GGUFHeader:
        if self._view[:4] != _MAGIC:
            raise ModelError(f"{self._path} is not a GGUF file: it does not start with {_MAGIC!r}")
        self._at = 4
        version = self._take("I")
        if version not in _VERSIONS:
            readable = ", ".join(map(str, _VERSIONS))
            raise ModelError(f"{self._path} is GGUF version {version} (or big-endian); readable are {readable}")
        num_tensors, num_keys = self._take("Q"), self._take("Q")
        metadata = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._take("I"), keep=key in self._kept)
        table = [self._tensor() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT))
        start = -(-self._at // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in table:
            info = self._info(name, shape, kind, start + offset)
            if name in tensors:
                raise WeightsError(f"{self._path} holds two tensors called {name}")
            tensors[name] = info
        return GGUFHeader(self._path, metadata, tensors)

    def _info(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
        try:
            storage = GGMLQuantizationType(kind)
        except ValueError:
            raise WeightsError(f"{self._path}: {name} is of storage type {kind}, unknown to the gguf package") from None
        block, block_bytes = GGML_QUANT_SIZES[storage]
        if not shape or shape[-1] % block:
            raise WeightsError(
                f"{self._path}: {name} has shape {list(shape)}, not whole {storage.name} blocks of {block}"
            )
        num_bytes = prod(shape) // block * block_bytes
        if offset + num_bytes > len(self._view):
            raise WeightsError(
                f"{self._path} is truncated: {name} ends at byte {offset + num_bytes:,}, the file at "
                f"{len(self._view):,}; fetch it again"
            )
        return TensorInfo(name, shape, storage.name, offset, num_bytes)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._take("I")
        # ggml lists the fastest axis first
        shape = tuple(self._take("Q") for _ in range(num_dims))[::-1]
        return name, shape, self._take("I"), self._take("Q")

    def _value(self, kind: int, keep: bool) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind != GGUFValueType.ARRAY:
            return self._take(self._scalar(kind))
        inner, length = self._take("I"), self._take("Q")
        if inner == GGUFValueType.STRING:
            if keep:
                return [self._string() for _ in range(length)]
            for _ in range(length):
                self._at += 8 + int(struct.unpack_from("<Q", self._view, self._at)[0])
            return length
        if inner == GGUFValueType.ARRAY:
            return [self._value(inner, keep) for _ in range(length)]
        layout = f"<{length}{self._scalar(inner)}"
        values = struct.unpack_from(layout, self._view, self._at)
        self._at += struct.calcsize(layout)
        return list(values)

    def _scalar(self, kind: int) -> str:
        try:
            return _SCALARS[kind]
        except KeyError:
            raise WeightsError(f"{self._path} is damaged: {kind} is no metadata type; fetch it again") from None

    def _take(self, code: str) -> Any:
        value = struct.unpack_from(f"<{code}", self._view, self._at)[0]
        self._at += struct.calcsize(f"<{code}")
        return value

    def _string(self) -> str:
        length = self._take("Q")
        end = self._at + length
        if end > len(self._view):
            raise IndexError(f"a string of {length} bytes at {self._at}")
        text = self._view[self._at : end].decode("utf-8", "replace")
        self._at = end
        return text
