"""The GPU scripts' own logic: what is chosen to be run, and that a wrong kernel would be told from a right one."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import replace
from typing import Any

import attention_cases
import attention_checks
import attention_jobs
import attention_speed
import batch_steps
import fused_ops
import pytest
import torch
from enginebay.conformance.attention.cases import Case, combinations, supported
from enginebay.conformance.attention.trial import passed
from enginebay.plugins.records import HND, NHD
from enginebay.plugins.requirements import Hardware
from enginebay.worker.batch import SlotBatch
from measuring import Budget

HOPPER = Hardware(device="cuda", capability=(9, 0))
CASE = Case(
    backend="torch",
    dtype="float16",
    kv_dtype="float16",
    heads_per_kv=4,
    head_dim=64,
    block_size=16,
    layout=HND,
    window=None,
    soft_cap=None,
    sinks=False,
    work="decode",
    lse=True,
    captured=False,
)


# --- the choice ------------------------------------------------------------------------------------------------------


def test_cases_are_those_that_a_record_claims() -> None:
    record = replace(
        attention_cases.record_of("torch"), window=False, kv_dtypes=("float16", "bfloat16"), head_dims=(64,)
    )
    cases = list(combinations("torch", attention_cases.SMALL_FEATURES))
    claimed = supported(record, cases, HOPPER)
    assert {c.window for c in claimed} == {None}
    assert {c.head_dim for c in claimed} == {64}
    assert {c.sinks for c in claimed} == {False, True}
    assert supported(replace(record, requires=("no_such_module",)), cases, HOPPER) == []


def test_every_value_of_every_feature_is_run_for_a_backend_that_claims_all() -> None:
    chosen = attention_cases.chosen_cases("torch", HOPPER)
    for feature, values in attention_cases.FEATURES.items():
        wanted = set(values) - {"same"} | ({"bfloat16", "float16"} if feature == "kv_dtype" else set())
        assert {getattr(case, feature) for case in chosen} == wanted, feature
    assert all(case.work == "decode" for case in chosen if case.captured)
    assert len(chosen) < 60
    assert chosen == attention_cases.chosen_cases("torch", HOPPER)


def test_jobs_hold_every_case_once_and_keep_a_compiled_kernel_together() -> None:
    cases = [replace(CASE, block_size=16 * n) for n in range(1, 20)]
    library = [replace(c, backend="flashinfer", head_dim=64 * (1 + n % 2)) for n, c in enumerate(cases)]
    jobs = attention_cases.grouped([*cases, *library], 5)
    assert sorted(map(str, itertools.chain(*jobs))) == sorted(map(str, [*cases, *library]))
    assert sum(job[0].backend == "flashinfer" for job in jobs) == 2
    assert max(len(job) for job in jobs if job[0].backend == "torch") <= 5


def test_two_backends_share_a_cache() -> None:
    values = attention_checks.check_pair("torch", "torch", NHD, 16, dtype=torch.float16, head_dim=64, device="cpu")
    assert passed(values)


# --- jobs ------------------------------------------------------------------------------------------------------------


def fake_check(case: Case, device: str) -> dict[str, Any]:
    """Dies, fails, or succeeds by block size."""
    if case.block_size == 32:
        os._exit(3)
    if case.block_size == 64:
        raise ValueError("no")
    if case.block_size == 80:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return {"device": device}


def test_a_process_that_dies_costs_one_case() -> None:
    job = [replace(CASE, block_size=n) for n in (16, 32, 64, 80, 128)]
    found = {r.case.block_size: r for r in attention_jobs.run_jobs([job], fake_check, "cpu", 2, Budget(60))}
    assert len(found) == len(job)
    assert "illegal memory access" in (found[80].error or "")
    assert found[16].values == found[128].values == {"device": "cpu"}
    assert "status 3" in (found[32].error or "")
    assert "ValueError: no" in (found[64].error or "")


def test_what_time_does_not_allow_is_unfinished() -> None:
    found = list(attention_jobs.run_jobs([[CASE], [CASE]], fake_check, "cpu", 1, Budget(0)))
    assert [r.unfinished for r in found] == [True, True]


# --- figures ---------------------------------------------------------------------------------------------------------


def test_work_is_counted_as_the_literature_does() -> None:
    prefill = next(s for s in attention_speed.TARGETS if s.query_len == 4096)
    assert prefill.flops == 4 * 128 * 32 * 4 * sum(range(1, 4097))
    assert attention_speed.decode(1, 8192).cache_bytes(2) == 2 * 8 * 128 * 8192 * 2


# --- fused operations ------------------------------------------------------------------------------------------------

TINY = fused_ops.Sizes(width=48, mlp=40, heads=4, kv_heads=2, head_dim=16)


@pytest.mark.parametrize("make", fused_ops.OPERATIONS)
@pytest.mark.parametrize("tokens", [1, 19])
def test_an_operation_equals_its_parts_and_another_does_not(make: fused_ops.Make, tokens: int) -> None:
    torch.manual_seed(0)
    operation = make(tokens, TINY, torch.float16, torch.device("cpu"), 1 << 14)
    assert fused_ops.worst_error(operation) <= 1

    def off(i: int) -> tuple[torch.Tensor, ...]:
        first, *rest = operation.fused(i)
        first[-1, ..., -1] += 0.1
        return first, *rest

    def missing(i: int) -> tuple[torch.Tensor, ...]:
        return tuple(t * math.nan for t in operation.fused(i))

    assert not fused_ops.worst_error(replace(operation, fused=off)) <= 1
    assert not fused_ops.worst_error(replace(operation, fused=missing)) <= 1


# --- batch preparation -----------------------------------------------------------------------------------------------


def test_steps_of_the_batch_are_equal_and_a_wrong_position_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert batch_steps.equal_on(torch.device("cpu"))
    kinds = [(out.num_decode_rows, len(out.slots), padded) for out, padded in batch_steps.outputs()]
    assert kinds == [(0, 3, None), (2, 3, None), (3, 3, 8), (3, 3, 8)]
    apply, calls = SlotBatch.apply, itertools.count()

    def wrong(self: SlotBatch, output: Any, padded_rows: int | None = None) -> Any:
        batch = apply(self, output, padded_rows)
        batch.positions[-1] += next(calls) % 2
        return batch

    monkeypatch.setattr(SlotBatch, "apply", wrong)
    assert not batch_steps.equal_on(torch.device("cpu"))
