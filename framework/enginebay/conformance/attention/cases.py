"""Which combinations of features are tried: all pairs of those that a record claims.

A combination is a `Case`. Of the cases that a backend's record says it supports, `pairwise` picks a few so that every pair
of feature values that occurs in any of them occurs in a picked one. A record that claims too much therefore fails; what it
does not claim is in `undeclared`, and must be refused. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from enginebay.conformance.claims import Undeclared
from enginebay.conformance.covering import covering
from enginebay.conformance.suite import Settings, refused_here
from enginebay.plugins.records import AttentionRecord, KVLayout, Phase
from enginebay.plugins.requirements import FP8, AttentionSpec, Hardware, Requirements

#: ``decode``: one token a row; ``prefill``: whole prompts; ``extend``: chunks over a cached context, some of one token
Work = Literal["decode", "prefill", "extend"]


@dataclass(frozen=True)
class Case:
    """One combination of features."""

    backend: str
    dtype: str
    kv_dtype: str
    #: query heads a KV head
    heads_per_kv: int
    head_dim: int
    block_size: int
    layout: KVLayout
    window: int | None
    soft_cap: float | None
    sinks: bool
    work: Work
    lse: bool
    #: whether the step is captured in a CUDA graph and replayed on another batch, padding rows included
    captured: bool

    @property
    def phase(self) -> Phase:
        """The phase that the work belongs to."""
        return "decode" if self.work == "decode" else "prefill"

    @property
    def spec(self) -> AttentionSpec:
        """The layer."""
        kv_heads = 4 if self.heads_per_kv == 1 else 2
        return AttentionSpec(
            num_heads=kv_heads * self.heads_per_kv,
            num_kv_heads=kv_heads,
            head_dim=self.head_dim,
            scale=1 / math.sqrt(self.head_dim),
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
        )

    def requirements(self, hardware: Hardware) -> Requirements:
        """What the resolver would ask of the backend."""
        return Requirements(
            hardware=hardware,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            attention=(self.spec,),
            phases=(self.phase,),
            block_size=self.block_size,
            graphs=self.captured,
        )

    def __str__(self) -> str:
        words = [self.work, self.dtype, f"kv {self.kv_dtype}", f"gqa {self.heads_per_kv}"]
        words += [f"d {self.head_dim}", f"block {self.block_size}", self.layout.name]
        words += [f"window {self.window}"] * (self.window is not None) + [f"cap {self.soft_cap}"] * bool(self.soft_cap)
        words += [word for word in ("sinks", "lse", "captured") if getattr(self, word)]
        return ", ".join(words)


def combinations(backend: str, features: Mapping[str, Sequence[Any]]) -> Iterator[Case]:
    """The full product, less captured steps that are no decode; ``kv_dtype`` "same" is the compute dtype."""
    for values in itertools.product(*features.values()):
        case = Case(backend, **dict(zip(features, values, strict=True)))
        if case.captured and case.work != "decode":
            continue
        yield replace(case, kv_dtype=case.dtype) if case.kv_dtype == "same" else case


def supported(record: AttentionRecord, cases: Iterable[Case], hardware: Hardware) -> list[Case]:
    """The cases that the record claims, by its own answer and its layouts; none if its library is missing or too old."""
    if refused_here(record, hardware):
        return []
    installed = replace(record, requires=(), requires_dist=())  # asked thousands of times: the metadata is read once

    @functools.cache
    def claims(case: Case) -> bool:
        layouts = [layout.axes for layout in record.kv_layouts(case.spec)]
        return case.layout.axes in layouts and installed.supports(case.requirements(hardware)).ok

    # nothing that a backend is asked speaks of the lse
    return [case for case in cases if claims(replace(case, lse=False))]


def pairwise(cases: Sequence[Case]) -> list[Case]:
    """A covering choice of `cases`."""
    names = [field.name for field in fields(Case)]
    return [cases[i] for i in covering([[getattr(case, name) for name in names] for case in cases])]


# --- from a record ---------------------------------------------------------------------------------------------------


def features(record: AttentionRecord, settings: Settings) -> dict[str, tuple[Any, ...]]:
    """Values of each feature that the record declares; of what it leaves open, a few that differ in kind."""
    full = settings.level == "full"
    blocks = sorted({n for k in record.kernel_blocks for n in (k, _up(k, 16), _up(k, 48), *([_up(k, 128)] * full))})
    return {
        "dtype": record.dtypes,
        "kv_dtype": record.kv_dtypes,
        "heads_per_kv": (1, 4, 7) if not full else (1, 2, 4, 7, 8, 16),
        "head_dim": record.head_dims or (32, 64, 80, 128),
        "block_size": tuple(blocks),
        "layout": tuple(record.layouts),
        "window": (None, 1, 20) if record.window else (None,),
        "soft_cap": (None, 3.0) if record.soft_cap else (None,),
        "sinks": (False, True) if record.sinks else (False,),
        "work": (*(("decode",) * ("decode" in record.phases)), *(("prefill", "extend") * ("prefill" in record.phases))),
        "lse": (False, True),
        "captured": (False, True) if settings.device == "cuda" and record.graph_support != "never" else (False,),
    }


def declared_cases(record: AttentionRecord, settings: Settings, hardware: Hardware) -> list[Case]:
    """The cases to run for a record: all pairs of what it declares, or all of it."""
    cases = supported(record, combinations(record.name, features(record, settings)), hardware)
    return cases if settings.exhaustive else pairwise(cases)


def plain_case(record: AttentionRecord, settings: Settings, work: Work, hardware: Hardware) -> Case | None:
    """The case without features, in the most exact dtype that the record has; None if it lacks the phase."""
    every = combinations(record.name, features(record, settings))
    wanted = (c for c in every if c.work == work and c.lse and not c.captured and c.window is c.soft_cap is None)
    found = supported(record, [c for c in wanted if not c.sinks and c.heads_per_kv == 4], hardware)
    exactness = {"float32": 0, "float16": 1, "bfloat16": 2}
    # the smallest heads and a block of several tokens
    return min(
        found,
        key=lambda c: (
            exactness.get(c.dtype, 3),
            exactness.get(c.kv_dtype, 3),
            c.block_size < 4,
            c.block_size,
            c.head_dim,
        ),
        default=None,
    )


def undeclared(record: AttentionRecord) -> list[Undeclared]:
    """One demand for each feature, or value of one, that the record lacks."""
    found: list[Undeclared] = []

    def add(feature: str, value: Any, **changes: Any) -> None:
        found.append(Undeclared(feature, value, tuple(changes.items())))

    spec = _spec_of(record)
    for dtype in {"float32", "float16", "bfloat16"} - set(record.dtypes):
        add("dtype", dtype, dtype=dtype)
    for dtype in {"float32", "float16", "bfloat16", FP8, "float8_e5m2", "int8"} - set(record.kv_dtypes):
        add("kv_dtype", dtype, kv_dtype=dtype)
    for phase in {"decode", "prefill"} - set(record.phases):
        add("phase", phase, phases=(phase,))
    if record.head_dims is not None:
        size = next(n for n in (72, 40, 24, 8) if n not in record.head_dims)
        add("head_dim", size, attention=(replace(spec, head_dim=size),))
    if not record.window:
        add("window", 64, attention=(replace(spec, window=64),))
    if not record.soft_cap:
        add("soft_cap", 30.0, attention=(replace(spec, soft_cap=30.0),))
    if not record.sinks:
        add("sinks", True, attention=(replace(spec, sinks=True),))
    if record.graph_support == "never" and "decode" in record.phases:
        add("graphs", True, graphs=True, phases=("decode",))
    if odd := [n for n in range(1, 64) if all(n % k for k in record.kernel_blocks)]:
        add("block_size", odd[-1], block_size=odd[-1])
    for other in {"cpu", "cuda"} - set(record.devices):
        add("device", other, hardware=Hardware(device=other, capability=(9, 0) if other == "cuda" else None))
    if record.min_capability is not None and "cuda" in record.devices:
        old = (record.min_capability[0] - 1, 9)
        add("capability", f"sm_{old[0]}{old[1]}", hardware=Hardware(device="cuda", capability=old))
    return sorted(found, key=str)


def demand(record: AttentionRecord, hardware: Hardware, **changes: Any) -> Requirements:
    """A demand that the record meets by its own account, with `changes`."""
    given: dict[str, Any] = {
        "hardware": hardware,
        "dtype": record.dtypes[0],
        "kv_dtype": record.dtypes[0] if record.dtypes[0] in record.kv_dtypes else record.kv_dtypes[0],
        "attention": (_spec_of(record),),
        "phases": record.phases,
    }
    return Requirements(**given | changes)


def _spec_of(record: AttentionRecord) -> AttentionSpec:
    size = record.head_dims[0] if record.head_dims else 64
    return AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=size, scale=size**-0.5)


def _up(unit: int, size: int) -> int:
    """The least multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit
