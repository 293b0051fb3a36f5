"""Which combinations of features are run against the reference: all pairs of them, a backend at a time.

A combination is a `Case`. Of the cases that a backend's record says it supports, `covering` picks a few so that every pair
of feature values that occurs in any of them occurs in a picked one. A record that claims too much therefore fails, and one
that claims too little only shortens the list. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
from enginebay.plugins.records import HND, NHD, AttentionRecord, KVLayout, Phase
from enginebay.plugins.requirements import AttentionSpec, Hardware, Reason, Requirements

#: the plugin of each backend, by the name written in YAML
PLUGINS = {
    "torch": "enginebay_torch_attention",
    "triton": "enginebay_triton_attention",
    "flashinfer": "enginebay_flashinfer",
    "flash_attention": "enginebay_flash_attention",
}
LAYOUTS: dict[str, KVLayout] = {"NHD": NHD, "HND": HND}
FP8 = "float8_e4m3fn"

#: ``decode``: one token a row; ``prefill``: whole prompts; ``extend``: chunks over a cached context, some of one token
Work = Literal["decode", "prefill", "extend"]


def record_of(backend: str) -> AttentionRecord:
    """The record of a backend by its name."""
    record = importlib.import_module(PLUGINS[backend]).RECORD
    assert isinstance(record, AttentionRecord)
    return record


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
    layout: str
    window: int | None
    soft_cap: float | None
    sinks: bool
    work: Work
    lse: bool
    #: whether the step is captured in a CUDA graph and replayed on another batch, padding rows included
    captured: bool

    @property
    def phase(self) -> Phase:
        return "decode" if self.work == "decode" else "prefill"

    @property
    def spec(self) -> AttentionSpec:
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

    @property
    def kernel_variant(self) -> tuple[Any, ...]:
        """What a library that compiles at run time compiles anew for."""
        return (self.dtype, self.kv_dtype, self.head_dim, self.window is not None, self.soft_cap is not None)

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
        words = [self.backend, self.work, self.dtype, f"kv {self.kv_dtype}", f"gqa {self.heads_per_kv}"]
        words += [f"d {self.head_dim}", f"block {self.block_size}", self.layout]
        words += [f"window {self.window}"] * (self.window is not None) + [f"cap {self.soft_cap}"] * bool(self.soft_cap)
        words += [word for word in ("sinks", "lse", "captured") if getattr(self, word)]
        return ", ".join(words)


#: every value of every feature but the backend; ``kv_dtype`` "same" is the compute dtype
FEATURES: dict[str, tuple[Any, ...]] = {
    "dtype": ("bfloat16", "float16"),
    "kv_dtype": ("same", FP8),
    "heads_per_kv": (1, 4, 7, 8),
    "head_dim": (64, 96, 128, 192, 256),
    "block_size": (16, 32, 64, 128, 256),
    "layout": tuple(LAYOUTS),
    "window": (None, 64),
    "soft_cap": (None, 30.0),
    "sinks": (False, True),
    "work": ("decode", "prefill", "extend"),
    "lse": (False, True),
    "captured": (False, True),
}
#: what the interpreter on a CPU can compute in reasonable time: small, and never bfloat16, which it gets wrong
SMALL_FEATURES = FEATURES | {
    "dtype": ("float16",),
    "kv_dtype": ("same",),
    "heads_per_kv": (1, 7),
    "head_dim": (64, 96),
    "block_size": (16, 32),
    "captured": (False,),
}


def combinations(backend: str, features: Mapping[str, Sequence[Any]]) -> Iterator[Case]:
    """The full product, less captured steps that are no decode."""
    for values in itertools.product(*features.values()):
        case = Case(backend, **dict(zip(features, values, strict=True)))
        if case.captured and case.work != "decode":
            continue
        yield replace(case, kv_dtype=case.dtype) if case.kv_dtype == "same" else case


def supported(record: AttentionRecord, cases: Iterable[Case], hardware: Hardware) -> list[Case]:
    """The cases that the record claims, by its own answer and its layouts; none if its library is missing or too old."""
    if any(reason.code in ("missing_module", "distribution", "device") for reason in _refusals(record, hardware)):
        return []
    installed = replace(record, requires=(), requires_dist=())  # asked thousands of times: the metadata is read once

    @functools.cache
    def claims(case: Case) -> bool:
        layouts = [layout.axes for layout in record.kv_layouts(case.spec)]
        return LAYOUTS[case.layout].axes in layouts and installed.supports(case.requirements(hardware)).ok

    # nothing that a backend is asked speaks of the lse
    return [case for case in cases if claims(replace(case, lse=False))]


def _refusals(record: AttentionRecord, hardware: Hardware) -> tuple[Reason, ...]:
    return record.supports(Requirements(hardware=hardware, dtype="bfloat16", kv_dtype="bfloat16")).reasons


def covering(rows: Sequence[Sequence[Hashable]]) -> list[int]:
    """Indices of few rows in which every pair of values occurs that occurs in any row; greedy, the first row of equals wins.

    Parameters
    ----------
    rows
        Combinations: a value for each of at least two features, all of one length.
    """
    if not rows:
        return []
    codes = np.stack([_codes(column) for column in zip(*rows, strict=True)], axis=1)
    sizes = codes.max(axis=0) + 1
    pairs, start = [], 0
    for a, b in itertools.combinations(range(codes.shape[1]), 2):
        pairs.append(start + codes[:, a] * sizes[b] + codes[:, b])
        start += int(sizes[a] * sizes[b])
    pair_ids = np.stack(pairs, axis=1).astype(np.int32)
    wanted = np.zeros(start, dtype=np.int8)
    wanted[pair_ids] = 1
    chosen = []
    while wanted.any():
        best = int(wanted[pair_ids].sum(axis=1, dtype=np.int32).argmax())
        chosen.append(best)
        wanted[pair_ids[best]] = 0
    return chosen


def _codes(column: Sequence[Hashable]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Each value's number in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in column], dtype=np.int64)


def pairwise(cases: Sequence[Case]) -> list[Case]:
    """A covering choice of `cases`."""
    names = [field.name for field in fields(Case)]
    return [cases[i] for i in covering([[getattr(case, name) for name in names] for case in cases])]


#: Kernels that FlashInfer compiles at run time take up to a minute each, so its cases keep to a few of them. The first two
#: are those that the kit carries compiled: dtype, kv dtype, head size, window, soft cap.
FLASHINFER_VARIANTS: tuple[tuple[Any, ...], ...] = (
    ("bfloat16", "bfloat16", 128, False, False),
    ("bfloat16", "bfloat16", 64, False, False),
    ("float16", "float16", 128, True, False),
    ("bfloat16", "bfloat16", 256, False, True),
    ("bfloat16", FP8, 128, False, False),
    ("float16", FP8, 64, True, True),
)
COMPILED_AHEAD = 2


def chosen_cases(
    backend: str, hardware: Hardware, features: Mapping[str, Sequence[Any]] = FEATURES, variants: int | None = None
) -> list[Case]:
    """The cases to run for a backend.

    Parameters
    ----------
    backend
        Its name.
    hardware
        What its record is asked about.
    features
        The values of each feature.
    variants
        For FlashInfer, how many of `FLASHINFER_VARIANTS`; None: all of them.
    """
    cases = supported(record_of(backend), combinations(backend, features), hardware)
    if backend != "flashinfer":
        return pairwise(cases)
    # a covering choice of each variant: between variants, features are fixed together
    found = []
    for variant in FLASHINFER_VARIANTS[:variants]:
        found += pairwise([case for case in cases if case.kernel_variant == variant])
    return found


def grouped(cases: Sequence[Case], size: int) -> list[list[Case]]:
    """Jobs of at most about `size` cases; those of one FlashInfer kernel stay together, so that it is compiled once."""
    jobs: list[list[Case]] = []
    by_key: dict[Any, list[Case]] = {}
    for case in cases:
        key = (case.backend, case.kernel_variant if case.backend == "flashinfer" else None)
        by_key.setdefault(key, []).append(case)
    for (backend, _), members in by_key.items():
        count = 1 if backend == "flashinfer" else -(-len(members) // size)
        jobs += [members[i::count] for i in range(count)]
    return jobs
