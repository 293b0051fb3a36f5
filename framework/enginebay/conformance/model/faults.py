"""Checkpoints that differ from what a model wants, in one tensor each. It knows names and shapes, and no architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from enginebay.conformance.model.twin import Twin

#: what `Twin.write` takes
Changes = Mapping[str, Tensor | None]

_OF_A_TENSOR: dict[str, Callable[[str, Tensor], Changes]] = {
    "missing": lambda name, tensor: {name: None},
    "renamed": lambda name, tensor: {name: None, f"{name}_": tensor},
    "of another shape": lambda name, tensor: {name: torch.cat([tensor, tensor])},
    "of integers": lambda name, tensor: {name: tensor.to(torch.int8)},
}


def faults(twin: Twin, fault: str) -> dict[str, Changes]:
    """Changes of the checkpoint, by the tensor that an error has to name; `fault` is a word for it."""
    if fault == "not asked for":
        return {name: {name: torch.zeros(2)} for name in _further_names(twin)}
    return {name: _OF_A_TENSOR[fault](name, tensor) for name, tensor in twin.tensors.items()}


def _further_names(twin: Twin) -> list[str]:
    """Tensors that look as if they belonged: beside each one a bias and a scale, and those of a further layer."""
    saved = twin.tensors.keys()
    modules = {name.rpartition(".")[0] for name in saved}
    names = {f"{module}.{word}" for module in modules for word in ("bias", "weight_scale")}
    further = twin.hf.config.num_hidden_layers
    names |= {name.replace(".0.", f".{further}.") for name in saved if ".0." in name}
    # a tied head may be saved, and is then of another shape
    return sorted((names | {"unheard_of"}) - saved - {twin.head})
