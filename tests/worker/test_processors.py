"""Plugins' logits processors: what goes wrong in them bears their name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from enginebay.errors import PluginError
from enginebay.interfaces.sampler import LogitsProcessor, ProcessorContext, SamplerRows
from enginebay.interfaces.scheduler import Int32Array, NewRequest
from enginebay.plugins.records import LogitsProcessorRecord, NoOptions
from enginebay.worker.processors import ProcessorPart, build_processors
from pydantic import BaseModel
from torch import Tensor

CONTEXT = ProcessorContext(
    vocab_size=8, max_num_seqs=2, max_model_len=4, device=torch.device("cpu"), options=NoOptions()
)


class Options(BaseModel):
    size: int = 3


class Broken(LogitsProcessor):
    def add(self, requests: Sequence[NewRequest]) -> None:
        raise ValueError("no good")

    def applies_to(self, slots: Int32Array) -> bool:
        raise ValueError("no good")

    def apply(self, logits: Tensor, rows: SamplerRows) -> None:
        raise ValueError("no good")


def part(factory: Callable[[Any], Any], **changes: Any) -> ProcessorPart:
    record = LogitsProcessorRecord(name="odd", summary="a test's", factory=factory, api_version=0, **changes)
    return ProcessorPart(record=record, options=Options(size=5))


def test_each_is_made_with_its_own_options() -> None:
    contexts: list[ProcessorContext] = []

    def make(context: ProcessorContext) -> LogitsProcessor:
        contexts.append(context)
        return Broken(context)

    built = build_processors([part(make), part(make, stage="scaled", argmax_invariant=True)], CONTEXT)
    assert [(b.stage, b.argmax_invariant) for b in built] == [("logits", False), ("scaled", True)]
    assert [c.options for c in contexts] == [Options(size=5)] * 2
    assert {(c.vocab_size, c.max_num_seqs, c.max_model_len) for c in contexts} == {(8, 2, 4)}


def test_a_factory_that_fails_or_makes_something_else() -> None:
    with pytest.raises(PluginError, match=r"logits processor odd: its factory failed: .*division"):
        build_processors([part(lambda context: 1 / 0)], CONTEXT)
    with pytest.raises(PluginError, match="odd: its factory must return a LogitsProcessor, not 'x'"):
        build_processors([part(lambda context: "x")], CONTEXT)


def test_a_method_that_fails() -> None:
    [staged] = build_processors([part(Broken)], CONTEXT)
    rows: Any = None
    for call in (
        lambda: staged.processor.add([]),
        lambda: staged.processor.applies_to(np.zeros(1, dtype=np.int32)),
        lambda: staged.processor.apply(torch.zeros(1, 8), rows),
    ):
        with pytest.raises(PluginError, match=r"logits processor odd: \w+ failed: ValueError: no good"):
            call()
