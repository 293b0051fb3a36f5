"""Logits processors of plugins, made on a rank. What they raise is the plugin's fault, and is said by its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import BaseModel
from torch import Tensor

from enginebay.interfaces.sampler import LogitsProcessor, ProcessorContext, SamplerRows
from enginebay.interfaces.scheduler import Int32Array, NewRequest
from enginebay.plugins.making import called, made_by
from enginebay.plugins.records import LogitsProcessorRecord
from enginebay.sampling.pipeline import StagedProcessor

#: what helps besides mending the plugin
_OTHERWISE = "leave it out of sampler.processors"


@dataclass(frozen=True, kw_only=True)
class ProcessorPart:
    """A logits processor to be built on each rank."""

    record: LogitsProcessorRecord
    options: BaseModel


def build_processors(parts: Sequence[ProcessorPart], context: ProcessorContext) -> list[StagedProcessor]:
    """Make each part's processor, in order; each is given `context` with its own options.

    Raises
    ------
    PluginError
        A factory failed, or made something else.
    """
    built = []
    for part in parts:
        record = part.record
        own = replace(context, options=part.options)
        name = f"logits processor {record.name}"
        # mypy calls the class abstract; nothing is made of it here
        made = made_by(record, own, LogitsProcessor, name, _OTHERWISE)  # type: ignore[type-abstract]
        built.append(StagedProcessor(NamedProcessor(name, made), record.stage, record.argmax_invariant))
    return built


class NamedProcessor(LogitsProcessor):
    """A plugin's processor, whose failures bear its name."""

    def __init__(self, name: str, processor: LogitsProcessor) -> None:
        self._name = name
        self._processor = processor

    def add(self, requests: Sequence[NewRequest]) -> None:
        """Pass on."""
        called(lambda: self._processor.add(requests), self._name, "add", _OTHERWISE)

    def applies_to(self, slots: Int32Array) -> bool:
        """Pass on."""
        return called(lambda: self._processor.applies_to(slots), self._name, "applies_to", _OTHERWISE)

    def apply(self, logits: Tensor, rows: SamplerRows) -> None:
        """Pass on."""
        called(lambda: self._processor.apply(logits, rows), self._name, "apply", _OTHERWISE)
