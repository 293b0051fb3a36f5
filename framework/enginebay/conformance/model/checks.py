"""What the model laws compare, and what they say where it differs."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from enginebay.conformance.model.lab import ModelLab
from enginebay.conformance.model.samples import Sample
from enginebay.conformance.model.twin import NotTakenError, Twin, twin_of
from enginebay.errors import EngineBayError, WeightsError
from enginebay.interfaces.model import CausalLM
from enginebay.models.reference import ModelFiles
from enginebay.plugins.records import ModelRecord

#: what float32 sums in another order may differ by, relative to the largest logit where that is above 1
TOLERANCE = 2e-4


def twin(record: ModelRecord, sample: Sample) -> Twin:
    """A sample's twin; skips where transformers itself does not take the sample."""
    try:
        return twin_of(record.name, record.tiny_config, sample)
    except NotTakenError as error:
        pytest.skip(" ".join(str(error).split())[:200])


def opened(lab: ModelLab, files: ModelFiles, sample: Sample, **place: Any) -> CausalLM:
    """The model of a sample's checkpoint; skips where the plugin refuses the sample's settings.

    It refuses them by name, or by tensors that they add to the checkpoint and that it does not know.
    """
    try:
        return lab.open(files, **place)
    except EngineBayError as error:
        if not sample.changes:  # the architecture itself
            raise
        if not isinstance(error, WeightsError) or "tie_word_embeddings" in sample.changes:
            assert_names(error, words(sample))
        pytest.skip(f"the plugin refuses it: {' '.join(str(error).split())[:200]}")


def words(sample: Sample) -> list[str]:
    """Names of the fields that a sample changes."""
    return [name for name, value in sample.changes.items() if value is not None] or list(sample.changes)


def distance(got: Tensor, wanted: Tensor) -> float:
    """The largest difference of logits, relative to the largest wanted one where that is above 1.

    Infinite where there is a NaN, or where shapes differ.
    """
    if got.shape != wanted.shape:
        return torch.inf
    error = (got.detach().float().cpu() - wanted.float()).abs().max() / wanted.abs().max().clamp_min(1.0).float()
    return float(error.nan_to_num(nan=torch.inf))


def assert_logits(got: Tensor, wanted: Tensor, what: str) -> None:
    """`got` is `wanted`, on any device."""
    assert got.shape == wanted.shape, f"{what}: logits of shape {list(got.shape)} instead of {list(wanted.shape)}"
    error = distance(got, wanted)
    assert error <= TOLERANCE, f"{what}: logits are off transformers' by {error:.3g}; float32 explains {TOLERANCE:g}"


def assert_names(error: EngineBayError, names: Iterable[str]) -> None:
    """A refusal says which field or tensor it is about."""
    wanted = list(names)
    said = any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", str(error)) for name in wanted)
    assert said, f"refused without naming {' or '.join(wanted)}: {error}"


def assert_refused(lab: ModelLab, files: ModelFiles, name: str, what: str) -> None:
    """Loading a checkpoint is an error that names the tensor."""
    try:
        lab.open(files)
    except WeightsError as error:
        assert_names(error, [name])
    else:
        pytest.fail(f"{what}, and the checkpoint is loaded")


def with_head(twin: Twin, head: Tensor) -> Twin:
    """A twin with another, untied head."""
    hf = copy.deepcopy(twin.hf)
    hf.get_output_embeddings().weight.data = head
    return replace(twin, hf=hf)


def rounded(twin: Twin) -> Twin:
    """A twin that computes in bfloat16."""
    return replace(twin, hf=copy.deepcopy(twin.hf).bfloat16())
