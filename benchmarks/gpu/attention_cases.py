"""Which cases the GPU's checks run for each backend, and how they are dealt out to processes. Nothing here imports torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from enginebay.conformance.attention.cases import Case, combinations, pairwise, supported
from enginebay.plugins.records import HND, NHD, AttentionRecord, KVLayout
from enginebay.plugins.requirements import FP8, Hardware

#: the plugin of each backend, by the name written in YAML
PLUGINS = {
    "torch": "enginebay_torch_attention",
    "triton": "enginebay_triton_attention",
    "flashinfer": "enginebay_flashinfer",
    "flash_attention": "enginebay_flash_attention",
}
LAYOUTS: dict[str, KVLayout] = {layout.name: layout for layout in (NHD, HND)}


def record_of(backend: str) -> AttentionRecord:
    """The record of a backend by its name."""
    record = importlib.import_module(PLUGINS[backend]).RECORD
    assert isinstance(record, AttentionRecord)
    return record


#: every value of every feature but the backend; ``kv_dtype`` "same" is the compute dtype
FEATURES: dict[str, tuple[Any, ...]] = {
    "dtype": ("bfloat16", "float16"),
    "kv_dtype": ("same", FP8),
    "heads_per_kv": (1, 4, 7, 8),
    "head_dim": (64, 96, 128, 192, 256),
    "block_size": (16, 32, 64, 128, 256),
    "layout": tuple(LAYOUTS.values()),
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


def kernel_variant(case: Case) -> tuple[Any, ...]:
    """What a library that compiles at run time compiles anew for."""
    return (case.dtype, case.kv_dtype, case.head_dim, case.window is not None, case.soft_cap is not None)


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
        found += pairwise([case for case in cases if kernel_variant(case) == variant])
    return found


def grouped(cases: Sequence[Case], size: int) -> list[list[Case]]:
    """Jobs of at most about `size` cases; those of one FlashInfer kernel stay together, so that it is compiled once."""
    jobs: list[list[Case]] = []
    by_key: dict[Any, list[Case]] = {}
    for case in cases:
        key = (case.backend, kernel_variant(case) if case.backend == "flashinfer" else None)
        by_key.setdefault(key, []).append(case)
    for (backend, _), members in by_key.items():
        count = 1 if backend == "flashinfer" else -(-len(members) // size)
        jobs += [members[i::count] for i in range(count)]
    return jobs
