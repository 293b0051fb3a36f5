"""Weights of a folder of safetensors files.

The index, where there is one, is the allow-list: its tensors in its shards, and no other file of the folder. Everything
is checked when the source is opened, so a missing or truncated shard is found before any weight is loaded. It knows no
model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from enginebay.errors import WeightsError
from enginebay.loading.source import FileSpan, RawTensor

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
#: most names that an error lists
_LISTED = 10
#: What the header calls the dtypes that torch has.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class _OpenFile(NamedTuple):
    """A file that safetensors has checked and keeps mapped."""

    path: Path
    mapped: Any


class SafetensorsSource:
    """A `WeightSource` over a folder: single file or sharded.

    Raises
    ------
    WeightsError
        A shard is missing, truncated, or lacks a tensor that the index puts there; the message names both (C51).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        #: tensor name -> the open file that holds it
        self._files: dict[str, _OpenFile] = {}
        #: spans of each file that was asked for one
        self._spans: dict[Path, dict[str, FileSpan]] = {}
        with ExitStack() as on_error:
            on_error.callback(self.close)
            if (folder / _INDEX).is_file():
                self._open_indexed(_read_index(folder / _INDEX))
            else:
                file = self._open(_single_file(folder))
                self._files = dict.fromkeys(_in_file_order(file), file)
            on_error.pop_all()

    def names(self) -> list[str]:
        """Every tensor, shard by shard in file order."""
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape, from the header."""
        return tuple(self._file(name).mapped.get_slice(name).get_shape())

    def load(self, name: str) -> RawTensor:
        """Read one tensor to the host."""
        try:
            data = self._file(name).mapped.get_tensor(name)
        except SafetensorError as error:
            raise WeightsError(f"{name} cannot be read from {self._folder}: {error}") from error
        return RawTensor(name=name, shape=tuple(data.shape), data=data)

    def locate(self, name: str) -> FileSpan:
        """Where a tensor lies in its file."""
        path = self._file(name).path
        if path not in self._spans:
            self._spans[path] = _read_spans(path)
        try:
            return self._spans[path][name]
        except KeyError:
            raise WeightsError(f"{name} has a dtype in {path} that torch does not have") from None

    def close(self) -> None:
        """Release the files."""
        self._files = {}
        self._stack.close()

    def _file(self, name: str) -> _OpenFile:
        try:
            return self._files[name]
        except KeyError:
            raise WeightsError(f"{self._folder} has no tensor {name}, or it is closed") from None

    def _open_indexed(self, shard_of: dict[str, str]) -> None:
        """Open every shard of the index and check that it holds its tensors."""
        missing = sorted({shard for shard in shard_of.values() if not (self._folder / shard).is_file()})
        if missing:
            needing = [name for name, shard in shard_of.items() if shard in missing]
            raise WeightsError(
                f"{self._folder} lacks {_listed(missing)}, where {_INDEX} puts {_listed(needing)}; "
                "fetch the model again"
            )
        for shard in dict.fromkeys(shard_of.values()):
            file = self._open(self._folder / shard)
            expected = {name for name, where in shard_of.items() if where == shard}
            held = _in_file_order(file)
            absent = expected.difference(held)
            if absent:
                raise WeightsError(
                    f"{self._folder / shard} lacks {_listed(sorted(absent))}, which {_INDEX} puts there; "
                    "index and shards are of different checkpoints"
                )
            self._files.update((name, file) for name in held if name in expected)

    def _open(self, path: Path) -> _OpenFile:
        try:
            return _OpenFile(path, self._stack.enter_context(safe_open(path, framework="pt", device="cpu")))
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path} is truncated or damaged: {error}; fetch it again") from error


def _in_file_order(file: _OpenFile) -> list[str]:
    return list(file.mapped.offset_keys())


def _read_spans(path: Path) -> dict[str, FileSpan]:
    """Every tensor's place, from the header of a file that safetensors has checked.

    Source of the format: the README of the safetensors library.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    spans = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if entry["dtype"] in _DTYPES:
            spans[name] = FileSpan(
                path, 8 + length + begin, end - begin, tuple(entry["shape"]), _DTYPES[entry["dtype"]]
            )
    return spans


def _single_file(folder: Path) -> Path:
    """The one safetensors file of a folder without an index."""
    if (folder / _SINGLE).is_file():
        return folder / _SINGLE
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise WeightsError(
            f"{folder} holds {_listed([file.name for file in found])}, but no {_INDEX} that says which of them belong "
            "to the model"
        )
    pickled = sorted(file.name for file in folder.glob("*.bin"))
    instead = f"; {_listed(pickled)} cannot be read, for a pickle may run code" if pickled else ""
    raise WeightsError(f"{folder} holds no safetensors file{instead}")


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> shard's file name."""
    try:
        shard_of = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(name, str) and isinstance(shard, str) for name, shard in shard_of.items()):
            raise TypeError("names and files must be strings")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path} is not an index of safetensors files: {type(error).__name__}: {error}") from error
    outside = sorted({shard for shard in shard_of.values() if Path(shard).name != shard})
    if outside:
        raise WeightsError(f"{path} names files outside its folder: {_listed(outside)}")
    return dict(shard_of)


def _listed(items: Iterable[str]) -> str:
    names = list(items)
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
