"""The GPU scripts' own logic: what is chosen to be run, and that a wrong kernel would be told from a right one."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import attention_cases
import attention_checks
import attention_jobs
import attention_speed
import attention_steps
import batch_steps
import fused_ops
import pytest
import torch
from attention_cases import Case
from enginebay.plugins.records import NHD
from enginebay.plugins.requirements import AttentionSpec, Hardware
from enginebay.worker.batch import SlotBatch
from hypothesis import given
from hypothesis import strategies as st
from measuring import Budget

HOPPER = Hardware(device="cuda", capability=(9, 0))
CASE = Case(
    backend="torch",
    dtype="float16",
    kv_dtype="float16",
    heads_per_kv=4,
    head_dim=64,
    block_size=16,
    layout="HND",
    window=None,
    soft_cap=None,
    sinks=False,
    work="decode",
    lse=True,
    captured=False,
)


# --- the choice ------------------------------------------------------------------------------------------------------


def pairs_in(rows: Sequence[Sequence[Any]]) -> set[tuple[int, Any, int, Any]]:
    columns = itertools.combinations(range(len(rows[0])), 2)
    return {(a, row[a], b, row[b]) for a, b in columns for row in rows}


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 4), min_size=1, max_size=200))
def test_a_covering_choice_holds_every_pair_that_occurs(rows: list[tuple[int, ...]]) -> None:
    chosen = attention_cases.covering(rows)
    assert pairs_in([rows[i] for i in chosen]) == pairs_in(rows)
    assert len(set(chosen)) == len(chosen)


def test_a_covering_choice_is_small() -> None:
    """At least the product of the two longest features is needed; four of four values can be had in twice that."""
    rows = list(itertools.product(range(4), repeat=4))
    assert 16 <= len(attention_cases.covering(rows)) <= 32
    assert attention_cases.covering([]) == []


def test_cases_are_those_that_a_record_claims() -> None:
    record = replace(
        attention_cases.record_of("torch"), window=False, kv_dtypes=("float16", "bfloat16"), head_dims=(64,)
    )
    cases = list(attention_cases.combinations("torch", attention_cases.SMALL_FEATURES))
    claimed = attention_cases.supported(record, cases, HOPPER)
    assert {c.window for c in claimed} == {None}
    assert {c.head_dim for c in claimed} == {64}
    assert {c.sinks for c in claimed} == {False, True}
    assert attention_cases.supported(replace(record, requires=("no_such_module",)), cases, HOPPER) == []


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


# --- the verdict -----------------------------------------------------------------------------------------------------


def answer_and_result(
    spec: AttentionSpec, *, dtype: torch.dtype = torch.bfloat16
) -> tuple[attention_steps.Answer, torch.Tensor]:
    """A float32 answer, and one that torch's own attention gives in `dtype` for rows of 1, 40 and 200 tokens."""
    generator = torch.Generator().manual_seed(0)
    rows = [attention_steps.Row(n, n) for n in (1, 40, 200)]
    batch, blocks = attention_steps.make_batch(rows, block_size=16, max_model_len=256, device=torch.device("cpu"))
    cache = attention_steps.make_cache(spec, NHD, blocks, 16, dtype, generator)
    query = attention_steps.make_query(spec, batch.num_tokens, dtype, generator)
    layer = attention_steps.make_layer(spec, generator)
    outs = []
    for row, n in enumerate((1, 40, 200)):
        start = int(batch.query_start_loc_host[row])
        ids = batch.groups[0].block_table[row, : -(-n // 16)].long()
        key, value = cache[ids].transpose(0, 1).flatten(1, 2)[:, :n].transpose(1, 2).unbind(0)
        q = query[start : start + n].transpose(0, 1)
        out = torch.nn.functional.scaled_dot_product_attention(
            q[None], key[None], value[None], is_causal=True, scale=spec.scale, enable_gqa=True
        )
        outs.append(out[0].transpose(0, 1))
    return attention_steps.reference(query, cache, batch, layer), torch.cat(outs)


SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torchs_own_attention_passes_and_a_key_too_many_does_not(dtype: torch.dtype) -> None:
    answer, out = answer_and_result(SPEC, dtype=dtype)
    verdict = attention_checks.compare(answer, out, answer.lse, len(out), SPEC)
    assert attention_checks.passed(verdict), verdict
    shifted = torch.cat([out[:2], out[1:-1]])  # each query attends as the one before it
    assert not attention_checks.passed(attention_checks.compare(answer, shifted, None, len(out), SPEC))


def test_what_is_left_unwritten_or_has_another_lse_does_not_pass() -> None:
    answer, out = answer_and_result(SPEC)
    unwritten = out.clone()
    unwritten[-1, -1, -1] = math.nan
    assert not attention_checks.passed(attention_checks.compare(answer, unwritten, None, len(out), SPEC))
    assert not attention_checks.passed(attention_checks.compare(answer, out, answer.lse + 0.05, len(out), SPEC))
    nan = torch.full_like(answer.lse, math.nan)
    assert not attention_checks.passed(attention_checks.compare(answer, out, nan, len(out), SPEC))


EVERYTHING = replace(CASE, sinks=True, kv_dtype=attention_cases.FP8, window=32, soft_cap=2.0)


@pytest.mark.parametrize("work", ["decode", "prefill", "extend"])
def test_a_backend_that_is_right_passes(work: attention_cases.Work) -> None:
    assert attention_checks.passed(attention_checks.check(replace(EVERYTHING, work=work), "cpu"))


@pytest.mark.parametrize("forgotten", ["k_scale", "v_scale", "sinks", "window", "soft_cap"])
@pytest.mark.parametrize("work", ["decode", "prefill", "extend"])
def test_a_backend_that_forgets_a_feature_does_not_pass(
    work: attention_cases.Work, forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is that of a layer without the feature, which the backend at hand has."""
    true = attention_steps.reference

    def without(query: Any, cache: Any, batch: Any, layer: Any) -> Any:
        if forgotten in ("window", "soft_cap"):
            return true(query, cache, batch, replace(layer, spec=replace(layer.spec, **{forgotten: None})))
        return true(query, cache, batch, replace(layer, **{forgotten: None if forgotten == "sinks" else 1.0}))

    monkeypatch.setattr(attention_checks, "reference", without)
    assert not attention_checks.passed(attention_checks.check(replace(EVERYTHING, work=work), "cpu"))


def test_two_backends_share_a_cache() -> None:
    values = attention_checks.check_pair("torch", "torch", NHD, 16, dtype=torch.float16, head_dim=64, device="cpu")
    assert attention_checks.passed(values)


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


@given(
    st.lists(st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n))), min_size=1, max_size=6),
    st.integers(1, 40),
    st.integers(0, 2),
)
def test_batches_give_every_token_a_block_of_its_own(
    lens: list[tuple[int, int]], block_size: int, padding: int
) -> None:
    rows = [attention_steps.Row(q, n) for q, n in lens]
    batch, blocks = attention_steps.make_batch(
        rows, block_size=block_size, max_model_len=200, device=torch.device("cpu"), padding=padding
    )
    table = batch.groups[0].block_table
    used = [int(b) for r, row in enumerate(rows) for b in table[r, : -(-row.seq_len // block_size)]]
    assert sorted(used) == list(range(1, blocks))
    assert batch.positions.tolist() == [*(p for q, n in lens for p in range(n - q, n)), *[0] * padding]
    slots = batch.groups[0].slot_mapping.tolist()
    assert slots[len(slots) - padding :] == [-1] * padding
    expected = [
        int(table[r, p // block_size]) * block_size + p % block_size
        for r, (q, n) in enumerate(lens)
        for p in range(n - q, n)
    ]
    assert slots[: len(slots) - padding] == expected


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
