"""Filling a model from a checkpoint, strictly and one tensor at a time.

Every tensor of the checkpoint is consumed or declared ignored, every parameter is filled, shapes and kinds of dtype
fit; otherwise one `WeightsError` lists everything that is wrong. It knows no model and no file format.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from enginebay.errors import WeightsError
from enginebay.interfaces.model import CausalLM
from enginebay.interfaces.quant import Quantizer
from enginebay.layers.weights import WeightModule, WeightTarget
from enginebay.loading.source import RawTensor, WeightSource
from enginebay.loading.staged_reads import read_all

#: most names a category that an error lists
_LISTED = 20


def expected_tensors(model: CausalLM) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor that the checkpoint must have, whole whatever the rank."""
    return {name: target.shape for name, target in _targets(model).items()}


def load_weights(model: CausalLM, source: WeightSource, quantizer: Quantizer | None = None) -> None:
    """Fill the model's parameters in place, each in its own dtype and on its own device.

    No more than one checkpoint tensor is held at a time, or two while a tied matrix is compared. On CUDA it is held on the
    device, read there by `enginebay.loading.staged_reads`.

    Raises
    ------
    WeightsError
        Tensors are missing, extra, misshapen, of the wrong kind, encoded in a way that `quantizer` does not read, or a
        tied matrix is present and differs.
    """
    targets = _targets(model)
    aliases = _aliases(model, targets)
    names = source.names()
    _check_names(model, source, names, targets, aliases)
    problems: list[str] = []
    tensors = read_all(source, [name for name in names if name in targets], _device(targets))
    for name in names:
        if name in targets:
            target = targets[name]
            tensor = _plain(next(tensors), quantizer, target.destination.dtype)
            problem = _misfit(tensor, target)
            if problem:
                problems.append(f"{name}: {problem}")
            else:
                target.fill(tensor)
            del tensor  # before the next one is made
        elif name in aliases and not _equal(source.load(name), source.load(aliases[name]), quantizer):
            problems.append(
                f"{name} differs from {aliases[name]}, though the configuration ties them; "
                "set tie_word_embeddings to false in config.json if the checkpoint means two matrices"
            )
    if problems:
        raise WeightsError("the checkpoint does not fit the model:\n  " + "\n  ".join(problems))
    for module in _layers(model):
        module.finish_loading()


def _device(targets: dict[str, WeightTarget]) -> torch.device:
    return next((target.destination.device for target in targets.values()), torch.device("cpu"))


def _layers(model: CausalLM) -> Iterator[WeightModule]:
    return (module for module in model.modules() if isinstance(module, WeightModule))


def _targets(model: CausalLM) -> dict[str, WeightTarget]:
    """Every checkpoint tensor that the model wants, by name; checks that they cover every parameter."""
    found: dict[str, WeightTarget] = {}
    covered: set[int] = set()
    for layer in _layers(model):
        for target in layer.targets():
            name = f"{model.weight_map.checkpoint_module(target.module)}.{target.weight}"
            if name in found:
                raise WeightsError(f"two layers of the model load {name}; their names or the weight map are wrong")
            found[name] = target
        covered.update(id(parameter) for parameter in layer.parameters(recurse=False))
    stray = [name for name, parameter in model.named_parameters() if id(parameter) not in covered]
    if stray:
        raise WeightsError(f"parameters that no layer of enginebay loads: {_listed(stray)}; make them through `build`")
    return found


def _aliases(model: CausalLM, targets: dict[str, WeightTarget]) -> dict[str, str]:
    """Tensor names of tied modules, each with the name that it shares content with."""
    found = {}
    for alias, original in model.weight_map.tied:
        prefix = f"{model.weight_map.checkpoint_module(original)}."
        for name in targets:
            if name.startswith(prefix):
                found[f"{model.weight_map.checkpoint_module(alias)}.{name.removeprefix(prefix)}"] = name
    return found


def _check_names(
    model: CausalLM,
    source: WeightSource,
    names: list[str],
    targets: dict[str, WeightTarget],
    aliases: dict[str, str],
) -> None:
    """Compare names and shapes before any data is read."""
    present = set(names)
    missing = sorted(targets.keys() - present)
    extra = sorted(n for n in present if n not in targets and n not in aliases and not model.weight_map.is_ignored(n))
    misshapen = []
    for name in names:
        wanted = targets.get(name) or targets.get(aliases.get(name, ""))
        if wanted is not None and not _same_shape(source.shape(name), wanted.shape):
            misshapen.append(f"{name} {list(source.shape(name))} instead of {list(wanted.shape)}")
    lines = []
    if missing:
        lines.append(f"{len(missing)} missing: {_listed(missing)}")
    if extra:
        lines.append(f"{len(extra)} unexpected: {_listed(extra)}")
    if misshapen:
        lines.append(f"{len(misshapen)} of another shape: {_listed(misshapen)}")
    if lines:
        raise WeightsError("the checkpoint does not fit the model:\n  " + "\n  ".join(lines))


def _same_shape(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    # A scalar is saved as [] by some tools and as [1] by others.
    return tuple(found) == wanted or (wanted == () and tuple(found) == (1,))


def _listed(items: list[str]) -> str:
    more = f", and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return ", ".join(items[:_LISTED]) + more


def _plain(raw: RawTensor, quantizer: Quantizer | None, dtype: torch.dtype) -> Tensor:
    if raw.encoding is None:
        return raw.data
    if quantizer is None:
        raise WeightsError(f"{raw.name} is encoded as {raw.encoding!r}, and no quantizer is selected that reads it")
    return quantizer.decode(raw, dtype)


def _misfit(tensor: Tensor, target: WeightTarget) -> str:
    """Why a tensor's values cannot stand for the parameter's; empty if they can."""
    if not _same_shape(tuple(tensor.shape), target.shape):
        return f"decoded to shape {list(tensor.shape)} instead of {list(target.shape)}"
    found, wanted = tensor.dtype, target.destination.dtype
    # Plain float widths convert into each other. Integers and 8-bit floats mean nothing without their scales.
    if found != wanted and not (_is_plain_float(found) and _is_plain_float(wanted)):
        return f"holds {found}, but the layer keeps {wanted}; the checkpoint's quantization was not recognised"
    return ""


def _is_plain_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


def _equal(a: RawTensor, b: RawTensor, quantizer: Quantizer | None) -> bool:
    """Whether two checkpoint tensors hold the same values."""
    if a.encoding == b.encoding:
        return torch.equal(a.data, b.data)
    return torch.equal(_plain(a, quantizer, torch.float32).float(), _plain(b, quantizer, torch.float32).float())
