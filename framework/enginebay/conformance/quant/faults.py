"""Checkpoints with one name wrong, and the names that an error has to say. It knows no quantizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from enginebay.conformance.quant.checkpoint import Checkpoint


@dataclass(frozen=True)
class NameFault:
    """A checkpoint that must not load."""

    what: str
    checkpoint: Checkpoint
    #: names that the error has to have
    named: tuple[str, ...]

    def __str__(self) -> str:
        return self.what


def name_faults(checkpoint: Checkpoint, modules: tuple[str, ...]) -> Iterator[NameFault]:
    """Each tensor of `modules` missing, and renamed; and one tensor too many.

    A GGUF file's names are its format's: only missing ones are tried there.
    """
    tensors = checkpoint.tensors
    for module in modules:
        for name in [name for name in tensors if name.rpartition(".")[0] == module]:
            rest = {other: tensor for other, tensor in tensors.items() if other != name}
            yield _fault(f"{name} is missing", checkpoint, rest, name)
            if checkpoint.sample.gguf_type is None:
                renamed = f"{name}_of_old"
                yield _fault(f"{name} is renamed", checkpoint, {**rest, renamed: tensors[name]}, name, renamed)
        if checkpoint.sample.gguf_type is None:
            extra = f"{module}.weight_of_another_method"
            yield _fault(f"{extra} is unknown", checkpoint, {**tensors, extra: torch.ones(1)}, extra)


def _fault(what: str, checkpoint: Checkpoint, tensors: Mapping[str, Tensor], *named: str) -> NameFault:
    return NameFault(what, replace(checkpoint, tensors=tensors), named)
