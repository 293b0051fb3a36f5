"""Logits processors of plugins, made on a rank. What they raise is the plugin's fault, and is said by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from pydantic import BaseModel
from torch import Tensor

from enginebay.errors import EngineBayError, PluginError
from enginebay.interfaces.sampler import LogitsProcessor, ProcessorContext, SamplerRows
from enginebay.interfaces.scheduler import Int32Array, NewRequest
from enginebay.plugins.records import LogitsProcessorRecord
from enginebay.plugins.registration import explain
from enginebay.sampling.pipeline import StagedProcessor

Result = TypeVar("Result")


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
        made = _call(name, "its factory", partial(record.factory, own))
        if not isinstance(made, LogitsProcessor):
            raise PluginError(f"{name}: its factory must return a LogitsProcessor, not {made!r}")
        built.append(StagedProcessor(NamedProcessor(name, made), record.stage, record.argmax_invariant))
    return built


class NamedProcessor(LogitsProcessor):
    """A plugin's processor, whose failures bear its name."""

    def __init__(self, name: str, processor: LogitsProcessor) -> None:
        self._name = name
        self._processor = processor

    def add(self, requests: Sequence[NewRequest]) -> None:
        """Pass on."""
        _call(self._name, "add", lambda: self._processor.add(requests))

    def applies_to(self, slots: Int32Array) -> bool:
        """Pass on."""
        return _call(self._name, "applies_to", lambda: self._processor.applies_to(slots))

    def apply(self, logits: Tensor, rows: SamplerRows) -> None:
        """Pass on."""
        _call(self._name, "apply", lambda: self._processor.apply(logits, rows))


def _call(name: str, what: str, function: Callable[[], Result]) -> Result:
    try:
        return function()
    except EngineBayError:
        raise
    except Exception as error:  # the plugin's own code may raise anything
        raise PluginError(
            f"{name}: {what} failed: {explain(error)}; correct it, or leave it out of sampler.processors"
        ) from error
