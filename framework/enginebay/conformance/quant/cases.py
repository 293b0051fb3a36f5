"""Which samples are tried in which dtypes, and what a record does not declare. Nothing here imports torch."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from enginebay.conformance.claims import Undeclared
from enginebay.conformance.suite import Settings
from enginebay.interfaces.quant_sample import QuantSample
from enginebay.plugins.records import QuantRecord
from enginebay.plugins.requirements import Hardware, Requirements

#: dtypes from the most exact on
DTYPES = ("float32", "float16", "bfloat16")
#: what no quantizer knows: a setting, and a value
UNKNOWN_SETTING = "enginebay_unknown_setting"
UNKNOWN_WORD = "enginebay-unknown"
#: a number that is no count of bits and no size
NONSENSE = -7


@dataclass(frozen=True)
class Case:
    """A sample in a compute dtype."""

    sample: QuantSample
    dtype: str

    def __str__(self) -> str:
        return f"{self.sample}, {self.dtype}"


@functools.lru_cache(maxsize=64)
def samples(record: QuantRecord) -> tuple[QuantSample, ...]:
    """The record's samples, made once."""
    return () if record.samples is None else tuple(record.samples())


def exact_cases(record: QuantRecord) -> list[Case]:
    """Every sample in the most exact dtype that the record has."""
    dtype = next((dtype for dtype in DTYPES if dtype in record.dtypes), record.dtypes[0])
    return [Case(sample, dtype) for sample in samples(record)]


def all_cases(record: QuantRecord, settings: Settings) -> list[Case]:
    """`exact_cases`, and each other dtype with every sample, or at the core level with some, so that each sample is in two."""
    found = exact_cases(record)
    others = [dtype for dtype in record.dtypes if not found or dtype != found[0].dtype]
    every = settings.exhaustive or settings.level == "full"
    for index, sample in enumerate(samples(record)):
        found += [Case(sample, dtype) for place, dtype in enumerate(others) if every or index % len(others) == place]
    present = {case.dtype for case in found}
    return found + [Case(samples(record)[0], dtype) for dtype in others if found and dtype not in present]


# --- what is not declared --------------------------------------------------------------------------------------------


def undeclared(record: QuantRecord) -> list[Undeclared]:
    """A demand for each dtype and device that the record lacks, for plain weights, and for a method of no plugin."""
    found = [Undeclared("dtype", dtype, (("dtype", dtype),)) for dtype in DTYPES if dtype not in record.dtypes]
    found += [Undeclared("quant_method", word, (("quant_method", word),)) for word in (UNKNOWN_WORD, None)]
    for other in ("cpu", "cuda"):
        if other not in record.devices:
            capability = (9, 0) if other == "cuda" else None
            found.append(Undeclared("device", other, (("hardware", Hardware(device=other, capability=capability)),)))
    return found


def demand(record: QuantRecord, hardware: Hardware, **changes: Any) -> Requirements:
    """A demand that the record meets by its own account, with `changes`."""
    given: dict[str, Any] = {
        "hardware": hardware,
        "dtype": record.dtypes[0],
        "kv_dtype": record.dtypes[0],
        "quant_method": record.checkpoint_methods[0] if record.checkpoint_methods else None,
    }
    return Requirements(**given | changes)


# --- settings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BrokenSetting:
    """A sample's settings with one that no quantizer can honour."""

    case: Case
    #: the setting's own name, the last of its path
    key: str
    value: Any
    config: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return f"{self.case}: {self.key} {self.value!r}"


def broken_settings(case: Case) -> list[BrokenSetting]:
    """An unknown setting; each whole number as a negative one; each word, the method's name aside, as one of no meaning."""
    found = [(UNKNOWN_SETTING, 1, {**case.sample.config, UNKNOWN_SETTING: 1})]
    found += list(_changed(case.sample.config))
    return [BrokenSetting(case, key, value, tuple(config.items())) for key, value, config in found]


def _changed(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Changed key, its new value, and the changed settings, nested ones included."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            for inner, new, changed in _changed(value):
                yield inner, new, {**config, key: changed}
        elif isinstance(value, int) and not isinstance(value, bool):
            yield key, NONSENSE, {**config, key: NONSENSE}
        elif isinstance(value, str) and key != "quant_method":
            yield key, UNKNOWN_WORD, {**config, key: UNKNOWN_WORD}
