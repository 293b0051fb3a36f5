"""The torch backend against a plain float32 reference that reads the cache token by token."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from enginebay.errors import PluginError
from enginebay.interfaces.attention import AttentionContext, AttentionLayer, PlanState
from enginebay.interfaces.batch import Bucket, GroupBatch, PhaseBatch
from enginebay.kernels.cpu.library import library
from enginebay.plugins.records import HND, NHD, KVLayout, NoOptions, Phase
from enginebay.plugins.requirements import AttentionSpec, Hardware, Requirements
from enginebay_torch_attention import RECORD, enginebay_attention_backends
from enginebay_torch_attention.backend import TorchAttention, TorchPlanState
from enginebay_torch_attention.grouping import group_rows
from enginebay_torch_attention.limits import CPU_LIMITS, Limits
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

CPU = torch.device("cpu")
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
MAX_LEN = 160
#: relative to the largest output; 16-bit weights and outputs are rounded
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
TINY = replace(CPU_LIMITS, kv_bytes=20_000, score_bytes=2_000, plan_bytes=4_000, query_block=5, slack=0)
SMALL = replace(TINY, kv_bytes=400_000, score_bytes=200_000, plan_bytes=60_000, query_block=32)


@dataclass(frozen=True)
class Case:
    """What a test varies. A row is ``(cached tokens, tokens in this step)``."""

    phase: Phase = "prefill"
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    heads: tuple[int, int] = (9, 3)
    head_dim: int = 64
    block: int = 16
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    #: of keys and of values
    scales: tuple[float, float] = (1.0, 1.0)
    layout: KVLayout = NHD
    rows: tuple[tuple[int, int], ...] = ((0, 7), (15, 2), (16, 33), (40, 1), (0, 1), (31, 31))
    device: str = "cpu"

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
        )

    @property
    def layer(self) -> AttentionLayer:
        sinks = torch.linspace(-2.0, 4.0, self.heads[0], device=self.device) if self.sinks else None
        return AttentionLayer(0, self.spec, *self.scales, sinks=sinks)

    @property
    def context(self) -> AttentionContext:
        return AttentionContext(
            spec=self.spec,
            group=1,
            phase=self.phase,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype or self.dtype,
            device=torch.device(self.device),
            block_size=self.block,
            layout=self.layout,
            max_num_rows=16,
            max_num_tokens=512,
            max_model_len=MAX_LEN,
            options=NoOptions(),
        )


@dataclass
class Step:
    """A filled cache and a batch over it; the rows' keys and values also as plain tensors."""

    case: Case
    query: Tensor
    cache: Tensor
    batch: PhaseBatch
    keys: list[Tensor]
    values: list[Tensor]


def empty_cache(case: Case, num_blocks: int) -> Tensor:
    """A cache full of NaN but for the null block, as the core allocates it."""
    sizes = {"blocks": num_blocks, "kv": 2, "block": case.block, "kv_heads": case.heads[1], "head_dim": case.head_dim}
    stored = torch.full([sizes[axis] for axis in case.layout.axes], torch.nan).to(case.kv_dtype or case.dtype)
    cache = stored.permute([case.layout.axes.index(axis) for axis in NHD.axes])
    cache[0] = 3.0
    return cache


def make_step(case: Case, seed: int = 0, *, slack: int = 0, shared: int = 0) -> Step:
    """Random rows in permuted blocks; `slack` is added to the host's lengths, `shared` leading blocks are row 0's."""
    generator = torch.Generator().manual_seed(seed)
    columns = -(-MAX_LEN // case.block)
    num_blocks = 1 + len(case.rows) * columns + 3
    cache = empty_cache(case, num_blocks)
    free = (1 + torch.randperm(num_blocks - 1, generator=generator)).tolist()
    table = torch.full((len(case.rows), columns), -7, dtype=torch.int32)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for r, (context, length) in enumerate(case.rows):
        total = context + length
        kv = torch.randn(2, total, case.heads[1], case.head_dim, generator=generator)
        if shared and r:
            known = shared * case.block
            kv[:, :known] = torch.stack((keys[0], values[0]))[:, :known]
        # as the core writes it: an fp8 cache holds what the scales divided
        scales = torch.tensor(case.scales)[:, None, None, None]
        kv = (kv / scales).to(cache.dtype)
        for b in range(-(-total // case.block)):
            table[r, b] = table[0, b] if r and b < shared else free.pop()
            part = kv[:, b * case.block : (b + 1) * case.block]
            cache[int(table[r, b]), :, : part.shape[1]] = part
        kv = kv.float() * scales
        keys.append(kv[0])
        values.append(kv[1])
    starts = np.concatenate(([0], np.cumsum([n for _, n in case.rows]))).astype(np.int32)
    lens = np.array([c + n for c, n in case.rows], dtype=np.int32)
    tokens = int(starts[-1])
    # As the model's layer passes it: a slice of QKV, heads side by side, tokens further apart.
    qkv = torch.randn(tokens, case.heads[0] + 2 * case.heads[1], case.head_dim, generator=generator).to(case.dtype)
    device = torch.device(case.device)
    nothing = torch.zeros(tokens, dtype=torch.int64, device=device)
    batch = PhaseBatch(
        num_rows=len(case.rows),
        num_tokens=tokens,
        max_query_len=max(n for _, n in case.rows),
        max_seq_len=int(lens.max()) + slack,
        query_start_loc=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(lens).to(device),
        positions=nothing,
        groups=(GroupBatch(torch.full_like(table, -9).to(device), nothing), GroupBatch(table.to(device), nothing)),
        query_start_loc_host=starts,
        seq_lens_host=lens + np.int32(slack),
    )
    strided = cache.to(device)
    assert strided.stride() == cache.stride()
    return Step(case, qkv.to(device)[:, : case.heads[0]], strided, batch, keys, values)


def reference(step: Step) -> tuple[Tensor, Tensor]:
    """Output ``[T, H, D]`` and lse ``[T, H]`` in float64, one query at a time."""
    spec = step.case.spec
    group = spec.num_heads // spec.num_kv_heads
    outs, lses = [], []
    queries = iter(step.query.double().cpu())
    for (context, length), k, v in zip(step.case.rows, step.keys, step.values, strict=True):
        k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
        for position in range(context, context + length):
            first = 0 if spec.window is None else max(0, position - spec.window + 1)
            seen = slice(first, position + 1)
            scores = torch.einsum("hd,shd->hs", next(queries), k[seen]) * spec.scale
            if spec.soft_cap is not None:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            lse = scores.logsumexp(-1)
            if step.case.layer.sinks is not None:
                lse = torch.logaddexp(lse, step.case.layer.sinks.double().cpu())
            outs.append(torch.einsum("hs,shd->hd", (scores - lse[:, None]).exp(), v[seen]))
            lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def run(step: Step, *, limits: Limits | None = None, lse: bool = False) -> tuple[Tensor, Tensor | None]:
    """The backend's answer, written over NaN."""
    backend = TorchAttention(step.case.context)
    if limits is not None:
        use_limits(backend, limits)
    state = backend.make_state(Bucket(len(step.case.rows), step.batch.max_query_len))
    backend.plan(step.batch, state)
    return attend(backend, step, state, lse=lse)


def use_limits(backend: TorchAttention, limits: Limits) -> None:
    backend.limits = limits
    backend._rows.limits = limits


def attend(backend: TorchAttention, step: Step, state: PlanState, *, lse: bool = False) -> tuple[Tensor, Tensor | None]:
    out = torch.full(step.query.shape, torch.nan, dtype=step.case.dtype, device=step.case.device)
    log_sums = torch.full(step.query.shape[:2], torch.nan, device=step.case.device) if lse else None
    backend.attend(step.case.layer, step.query, step.cache, step.batch, state, out, log_sums)
    return out.cpu(), None if log_sums is None else log_sums.cpu()


def check(step: Step, *, limits: Limits | None = None, lse: bool = False) -> None:
    out, log_sums = run(step, limits=limits, lse=lse)
    expected, expected_lse = reference(step)
    tolerance = TOLERANCE[step.case.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
    if log_sums is not None:
        torch.testing.assert_close(log_sums.double(), expected_lse, rtol=1e-5, atol=1e-5)


def pairwise(axes: dict[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Cases such that every pair of values of two axes occurs, greedily few."""
    names = list(axes)
    wanted = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(range(len(names)), 2)
        for x in range(len(axes[names[a]]))
        for y in range(len(axes[names[b]]))
    }
    cases = []
    while wanted:
        chosen: dict[int, int] = dict(next(iter(sorted(wanted))))
        for a in range(len(names)):
            if a not in chosen:
                gains = [
                    sum(tuple(sorted(((a, x), other))) in wanted for other in chosen.items())
                    for x in range(len(axes[names[a]]))
                ]
                chosen[a] = gains.index(max(gains))
        wanted -= set(itertools.combinations(sorted(chosen.items()), 2))
        cases.append({names[a]: axes[names[a]][x] for a, x in chosen.items()})
    return cases


AXES: dict[str, Sequence[Any]] = {
    "phase": ("decode", "prefill"),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "heads": ((9, 3), (4, 1), (8, 8)),
    "head_dim": (64, 80, 128),
    "block": (1, 16, 32),
    "window": (None, 1, 24),
    "soft_cap": (None, 5.0),
    "sinks": (False, True),
    "layout": (NHD, HND),
    "lse": (False, True),
    "limits": (None, TINY),
}
#: contexts around block edges
DECODE_ROWS = tuple((n, 1) for n in (0, 14, 15, 16, 17, 30, 31, 32, 33, 62, 63, 64, 120))


def case_name(options: dict[str, Any]) -> str:
    parts = {**options, "layout": options["layout"].name, "limits": "tiny" if options["limits"] else "default"}
    parts["dtype"] = str(options["dtype"]).removeprefix("torch.")
    return "-".join(f"{name}={value}" for name, value in parts.items())


@pytest.fixture(scope="module", params=["gathered", "in place"], autouse=True)
def cache_reader(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test runs with both ways on CPU: torch over a gathered copy, and the compiled kernels in place."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "gathered":
            gather(patch)
        elif library() is None:
            pytest.skip("no C++ compiler here: the kernel cannot be built")
        yield request.param


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what concerns only the gathered copy: its buffers, its products, its plan."""
    gather(monkeypatch)


def gather(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("enginebay_torch_attention.backend.decodes", lambda device, dtype: False)
    patch.setattr("enginebay_torch_attention.backend.prefills", lambda device, dtype, head_dim: False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", pairwise(AXES), ids=case_name)
def test_equals_the_reference(options: dict[str, Any], device: str) -> None:
    """C17: every declared capability in pairs with every other, unused memory NaN, outputs written over NaN."""
    options = dict(options)
    limits, lse = options.pop("limits"), options.pop("lse")
    rows = DECODE_ROWS if options["phase"] == "decode" else Case.rows
    check(make_step(Case(**options, rows=rows, device=device)), limits=limits, lse=lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICES)
def test_cache_of_another_dtype(dtype: torch.dtype, kv_dtype: torch.dtype, device: str) -> None:
    check(make_step(Case(dtype=dtype, kv_dtype=kv_dtype, device=device)), lse=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [NHD, HND], ids=lambda layout: layout.name)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("device", DEVICES)
def test_fp8_cache_is_scaled(phase: Phase, layout: KVLayout, dtype: torch.dtype, device: str) -> None:
    rows = DECODE_ROWS if phase == "decode" else Case.rows
    case = Case(phase=phase, dtype=dtype, kv_dtype=torch.float8_e4m3fn, layout=layout, rows=rows, device=device)
    check(make_step(replace(case, scales=(0.5, 2.0), soft_cap=5.0)), lse=True)
    check(make_step(replace(case, scales=(0.03, 0.7), sinks=True)))


@pytest.mark.parametrize("head_dim", [1, 8, 72, 256, 288])
@pytest.mark.parametrize("device", DEVICES)
def test_any_head_size(head_dim: int, device: str) -> None:
    check(make_step(Case(head_dim=head_dim, heads=(4, 2), device=device, dtype=torch.bfloat16)))


@pytest.mark.parametrize("block", [1, 3, 16, 32, 48])
@pytest.mark.parametrize("edge", [-1, 0, 1])
def test_lengths_at_block_edges(block: int, edge: int) -> None:
    totals = [n for n in (block + edge, 2 * block + edge, 3 * block + edge) if n > 0]
    check(make_step(Case(phase="decode", block=block, rows=tuple((n - 1, 1) for n in totals))))
    check(make_step(Case(block=block, rows=tuple((n // 2, n - n // 2) for n in totals))))


@pytest.mark.parametrize("layout", [NHD, HND], ids=lambda layout: layout.name)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_shared_blocks(layout: KVLayout, phase: Phase) -> None:
    rows = ((40, 1), (33, 1), (47, 1)) if phase == "decode" else ((40, 9), (33, 2), (32, 30))
    check(make_step(Case(phase=phase, layout=layout, rows=rows), shared=2))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("window", [None, 9])
def test_host_lengths_may_be_upper_bounds(phase: Phase, window: int | None) -> None:
    rows = DECODE_ROWS if phase == "decode" else Case.rows
    for limits in (None, TINY):
        check(make_step(Case(phase=phase, window=window, rows=rows), slack=5), limits=limits, lse=True)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("window", [None, 8])
def test_garbage_never_leaks(poison: float, window: int | None) -> None:
    """Whatever lies in free blocks, or past a row's end in its last block, changes no bit."""
    for phase, rows in (("decode", DECODE_ROWS), ("prefill", Case.rows)):
        step = make_step(Case(phase=phase, rows=rows, window=window))  # type: ignore[arg-type]
        clean = replace(step, cache=step.cache.nan_to_num(0.0))
        step.cache[step.cache.isnan()] = poison
        dirty_out, dirty_lse = run(step, lse=True)
        clean_out, clean_lse = run(clean, lse=True)
        assert dirty_lse is not None
        assert clean_lse is not None
        assert torch.isfinite(dirty_out).all()
        assert torch.equal(dirty_out, clean_out)
        assert torch.equal(dirty_lse, clean_lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_row_does_not_depend_on_its_batch(phase: Phase, dtype: torch.dtype) -> None:
    rows = DECODE_ROWS if phase == "decode" else Case.rows
    step = make_step(Case(phase=phase, dtype=dtype, rows=rows))
    together, _ = run(step)
    starts = step.batch.query_start_loc_host
    for r, row in enumerate(rows):
        span = slice(int(starts[r]), int(starts[r + 1]))
        host = np.array([0, row[1]], dtype=np.int32)
        batch = replace(
            step.batch,
            num_rows=1,
            num_tokens=row[1],
            max_query_len=row[1],
            max_seq_len=sum(row),
            query_start_loc=torch.from_numpy(host),
            query_start_loc_host=host,
            seq_lens=step.batch.seq_lens[r : r + 1],
            seq_lens_host=step.batch.seq_lens_host[r : r + 1],
            groups=tuple(GroupBatch(g.block_table[r : r + 1], g.slot_mapping[span]) for g in step.batch.groups),
        )
        alone, _ = run(Step(replace(step.case, rows=(row,)), step.query[span], step.cache, batch, [], []))
        torch.testing.assert_close(alone, together[span], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize("chunks", [(70,), (1, 69), (33, 37), (16, 16, 16, 22), (69, 1)])
def test_chunked_equals_whole(chunks: tuple[int, ...], window: int | None) -> None:
    whole = make_step(Case(rows=((0, 70),), window=window))
    expected, expected_lse = run(whole, lse=True)
    assert expected_lse is not None
    done = 0
    for chunk in chunks:
        span = slice(done, done + chunk)
        host = np.array([0, chunk], dtype=np.int32)
        lens = np.array([done + chunk], dtype=np.int32)
        batch = replace(
            whole.batch,
            num_tokens=chunk,
            max_query_len=chunk,
            max_seq_len=done + chunk,
            query_start_loc=torch.from_numpy(host),
            query_start_loc_host=host,
            seq_lens=torch.from_numpy(lens),
            seq_lens_host=lens,
        )
        case = replace(whole.case, rows=((done, chunk),))
        out, lse = run(Step(case, whole.query[span], whole.cache, batch, [], []), lse=True)
        torch.testing.assert_close(out, expected[span], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, expected_lse[span], rtol=1e-5, atol=1e-5)
        done += chunk
    assert done == 70


def test_many_short_prompts_and_one_long() -> None:
    rows = (*((0, n % 9 + 1) for n in range(32)), (10, 140), (100, 1))
    check(make_step(Case(rows=rows, heads=(4, 2), head_dim=16)), lse=True)


@pytest.mark.usefixtures("gathered")
def test_large_decode_in_bfloat16_takes_16_bit_products() -> None:
    """On CPUs with bfloat16 products large V is multiplied in it; elsewhere this is one more float32 case."""
    rows = tuple((150 - r, 1) for r in range(14))
    step = make_step(Case(phase="decode", dtype=torch.bfloat16, rows=rows, heads=(4, 2)))
    assert len(rows) * 150 * 2 * 64 > 1 << 17
    check(step)


@pytest.mark.parametrize("layout", [NHD, HND], ids=lambda layout: layout.name)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_cache_with_foreign_strides(layout: KVLayout, phase: Phase) -> None:
    """A cache padded between blocks, as when layers of several sizes share one pool."""
    rows = DECODE_ROWS if phase == "decode" else Case.rows
    step = make_step(Case(phase=phase, layout=layout, rows=rows))
    width = step.cache.stride(0)
    memory = torch.full((step.cache.shape[0], width + 24), torch.nan)
    padded = memory.as_strided(step.cache.shape, (width + 24, *step.cache.stride()[1:]), 0)
    padded.copy_(step.cache)
    backend = TorchAttention(step.case.context)
    state = backend.make_state(Bucket(len(rows), step.batch.max_query_len))
    expected, _ = reference(step)
    foreign = replace(step, cache=padded)
    backend.plan(step.batch, state)
    for turn in (foreign, step, foreign):
        out, _ = attend(backend, turn, state)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_cache_with_scattered_heads_is_refused() -> None:
    step = make_step(Case())
    backend = TorchAttention(step.case.context)
    state = backend.make_state(Bucket(8, 64))
    backend.plan(step.batch, state)
    scattered = step.cache.transpose(2, 4).contiguous().transpose(2, 4)
    with pytest.raises(PluginError, match=r"side by side.*head_dim"):
        attend(backend, replace(step, cache=scattered), state)


@pytest.mark.usefixtures("gathered")
def test_scratch_serves_steps_of_changing_size() -> None:
    """One backend and state over steps that grow, shrink and grow again."""
    sizes = (((0, 3),), ((0, 60), (20, 9)), ((5, 2),), ((0, 100), (59, 100), (3, 4)), ((0, 60),))
    backend = TorchAttention(Case().context)
    state = backend.make_state(Bucket(8, 100))
    for seed, rows in enumerate(sizes):
        step = make_step(Case(rows=rows), seed)
        backend.plan(step.batch, state)
        expected, _ = reference(step)
        for _ in range(2):
            out, _ = attend(backend, step, state)
            torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


# --- captured buckets ------------------------------------------------------------------------------------------------


def padded_step(case: Case, bucket: int) -> Step:
    """`case`'s decode rows, then padding rows up to `bucket`: length 1, null block."""
    step = make_step(case)
    extra = bucket - len(case.rows)
    batch = step.batch
    for group in batch.groups:
        group.block_table = torch.nn.functional.pad(group.block_table, (0, 0, 0, extra))
    device = batch.seq_lens.device
    batch.seq_lens = torch.cat((batch.seq_lens, torch.ones(extra, dtype=torch.int32, device=device)))
    query = torch.cat((step.query, torch.zeros(extra, *step.query.shape[1:], dtype=case.dtype, device=device)))
    return replace(step, query=query)


@pytest.mark.usefixtures("gathered")
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("limits", [None, TINY], ids=["default", "tiny"])
@pytest.mark.parametrize("layout", [NHD, HND], ids=lambda layout: layout.name)
def test_captured_bucket_keeps_its_buffers(window: int | None, limits: Limits | None, layout: KVLayout) -> None:
    """Shapes are the bucket's, addresses stay, padding rows are harmless, and no host length is read."""
    backend = TorchAttention(Case(phase="decode", window=window, layout=layout).context)
    if limits is not None:
        use_limits(backend, limits)
    state = backend.make_state(Bucket(8, 1, captured=True))
    addresses = None
    for seed, rows in enumerate(((0, 90, 31), (159, 16, 15, 17, 2, 8, 60, 33), (5,))):
        step = padded_step(Case(phase="decode", window=window, layout=layout, rows=tuple((n, 1) for n in rows)), 8)
        assert seed < 3
        step.batch.seq_lens_host = np.full(8, -1, dtype=np.int32)
        step.batch.query_start_loc_host = np.full(9, -1, dtype=np.int32)
        step.batch.max_seq_len = -1
        backend.plan(step.batch, state)
        kept = [p for p in state.prepared if p is not None]
        now = [p.index.data_ptr() for p in kept] + [b.mask.data_ptr() for p in kept for b in p.blocks]
        assert addresses in (None, now)
        addresses = now
        out, lse = attend(backend, step, state, lse=True)
        assert lse is not None
        expected, expected_lse = reference(step)
        torch.testing.assert_close(out[: len(rows)].double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[: len(rows)].double(), expected_lse, rtol=1e-5, atol=1e-5)
        assert torch.isfinite(out).all()
    assert sum(rows.num_rows for rows in state.groups) == 8


def test_captured_bucket_of_several_tokens_is_refused() -> None:
    with pytest.raises(PluginError, match="one token a row, not 4"):
        TorchAttention(Case(phase="decode").context).make_state(Bucket(8, 4, captured=True))


@pytest.mark.gpu
@pytest.mark.parametrize("limits", [None, TINY], ids=["default", "tiny"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padded_cache", [False, True])
def test_graph_replays_follow_the_plan(limits: Limits | None, dtype: torch.dtype, padded_cache: bool) -> None:
    def build(rows: tuple[int, ...], seed: int) -> Step:
        case = Case(phase="decode", dtype=dtype, rows=tuple((n, 1) for n in rows), device="cuda")
        step = padded_step(case, 8)
        if padded_cache:
            width = step.cache.stride(0)
            memory = torch.full((40 * 11, width + 64), torch.nan, dtype=dtype, device="cuda")
            size = (memory.shape[0], *step.cache.shape[1:])
            wide = memory.as_strided(size, (width + 64, *step.cache.stride()[1:]), 0)
            wide[: step.cache.shape[0]].copy_(step.cache)
            step.cache = wide
        return step

    fixed = build((0, 90, 31, 5, 6, 7, 8, 9), 0)
    backend = TorchAttention(fixed.case.context)
    if limits is not None:
        use_limits(backend, limits)
    state = backend.make_state(Bucket(8, 1, captured=True))
    out = torch.empty_like(fixed.query)
    layer = AttentionLayer(0, fixed.case.spec)
    backend.plan(fixed.batch, state)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        backend.attend(layer, fixed.query, fixed.cache, fixed.batch, state, out)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.attend(layer, fixed.query, fixed.cache, fixed.batch, state, out)
    for seed, rows in enumerate(((159, 16, 15, 17, 2, 8, 60, 33), (5, 88), (0,) * 8)):
        step = build(rows, seed)
        fixed.query.copy_(step.query)
        fixed.cache[: step.cache.shape[0]].copy_(step.cache[: fixed.cache.shape[0]])
        fixed.batch.seq_lens.copy_(step.batch.seq_lens)
        fixed.batch.groups[1].block_table.copy_(step.batch.groups[1].block_table)
        out.fill_(torch.nan)
        backend.plan(fixed.batch, state)
        graph.replay()
        expected, _ = reference(step)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(out[: len(rows)].double().cpu(), expected, rtol=tolerance, atol=tolerance * 4)
        assert torch.isfinite(out).all()


# --- memory, grouping, the record ------------------------------------------------------------------------------------


def peak_bytes(work: Callable[[], None], device: str) -> int:
    """Most bytes that `work` held at once beyond what there was, temporaries within operations included."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        work()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(itertools.accumulate(sizes), default=0)


@pytest.mark.usefixtures("gathered")
@pytest.mark.parametrize("limits", [None, SMALL], ids=["default", "small"])
@pytest.mark.parametrize(("dtype", "soft_cap"), [(torch.float32, None), (torch.bfloat16, 5.0), (torch.bfloat16, None)])
@pytest.mark.parametrize("device", DEVICES)
def test_workspace_bytes_bounds_what_is_taken(
    limits: Limits | None, soft_cap: float | None, dtype: torch.dtype, device: str
) -> None:
    steps: tuple[tuple[Phase, tuple[tuple[int, int], ...]], ...] = (
        ("decode", DECODE_ROWS),
        ("decode", ((159, 1),) * 13),
        ("prefill", Case.rows),
        ("prefill", ((0, 160), (0, 160), (1, 159))),
        ("prefill", (*((0, 1),) * 15, (0, 160))),
        ("prefill", ((159, 1),) * 16),
    )
    for phase, rows in steps:
        case = Case(phase=phase, rows=rows, dtype=dtype, soft_cap=soft_cap, device=device)
        step = make_step(case)
        bucket = Bucket(len(rows), step.batch.max_query_len, captured=device == "cuda" and phase == "decode")
        out, lse = torch.empty_like(step.query), torch.empty(step.query.shape[:2], device=device)
        layer = AttentionLayer(0, case.spec)

        def make() -> TorchAttention:
            backend = TorchAttention(case.context)  # noqa: B023 - called within the turn
            if limits is not None:
                use_limits(backend, limits)
            return backend

        def work() -> None:
            backend = make()
            state = backend.make_state(bucket)  # noqa: B023
            for _ in range(2):
                backend.plan(step.batch, state)  # noqa: B023
                backend.attend(layer, step.query, step.cache, step.batch, state, out, lse)  # noqa: B023
                backend.attend(layer, step.query, step.cache, step.batch, state, out)  # noqa: B023

        if device == "cuda":
            work()  # cuBLAS takes its own workspace, once
        rounding = 64 * 512 if device == "cuda" else 0
        assert 0 < peak_bytes(work, device) <= make().workspace_bytes(bucket) + rounding, (phase, rows)


def test_workspace_is_bounded_whatever_the_context() -> None:
    context = replace(Case(dtype=torch.bfloat16).context, max_model_len=32_768, max_num_tokens=2048, max_num_rows=64)
    limits = CPU_LIMITS
    most = 2 * (limits.plan_bytes + limits.kv_bytes + limits.score_bytes)
    assert TorchAttention(context).workspace_bytes(Bucket(64, 2048)) < 3 * most
    windowed = replace(context, spec=replace(context.spec, window=128), phase="decode")
    assert TorchAttention(windowed).workspace_bytes(Bucket(1, 1)) < 1 << 20


def lengths(values: Sequence[int]) -> Any:
    return np.array(values, dtype=np.int64)


@given(
    rows=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), min_size=1, max_size=40),
    max_keys=st.integers(1, 4000),
    slack=st.sampled_from([0, 10_000, 10**9]),
    split=st.booleans(),
)
def test_groups_partition_the_rows(rows: list[tuple[int, int]], max_keys: int, slack: int, split: bool) -> None:
    """Each row is in one group that holds its lengths; groups keep to the limits; tokens are those of the rows."""
    queries, contexts = [n for _, n in rows], [c for c, _ in rows]
    totals = [c + n for c, n in rows]
    groups = group_rows(
        lengths(queries), lengths(totals), max_keys=max_keys, slack=slack, split_uncached=split, device=CPU
    )
    starts = [0, *itertools.accumulate(queries)]
    seen: list[int] = []
    for group in groups:
        members = list(range(len(rows)))[group.rows] if isinstance(group.rows, slice) else group.rows.tolist()
        seen += members
        assert group.num_rows == len(members)
        assert group.query_len == max(queries[r] for r in members)
        assert group.key_len == max(totals[r] for r in members)
        assert group.context_len == max(contexts[r] for r in members)
        assert group.num_rows == 1 or group.num_rows * group.key_len <= max_keys
        assert not split or len({contexts[r] == 0 for r in members}) == 1
        tokens = [t for r in members for t in range(starts[r], starts[r + 1])]
        if isinstance(group.tokens, slice):
            assert list(range(starts[-1]))[group.tokens] == tokens
        else:
            assert group.tokens.target.tolist() == tokens
            assert group.tokens.padded[group.tokens.real].tolist() == tokens
            assert group.tokens.padded.numel() == group.num_rows * group.query_len
        blocks = list(group.blocks(7))
        assert [a for a, _, _ in blocks] == list(range(0, group.query_len, 7))
        assert all(keys >= min(group.key_len, group.context_len + b) for _, b, keys in blocks)
    assert sorted(seen) == list(range(len(rows)))


def test_equal_rows_make_one_group_and_unequal_ones_few() -> None:
    def count(queries: list[int], totals: list[int]) -> int:
        sizes = lengths(queries), lengths(totals)
        return len(group_rows(*sizes, max_keys=100_000, slack=16_000, split_uncached=False, device=CPU))

    assert count([1] * 32, list(range(128, 160))) == 1
    assert count([8] * 32, [8] * 32) == 1
    assert count([1] * 31 + [1], [16] * 31 + [4096]) == 2
    assert count([1] * 256, list(range(1, 257))) < 10


def test_the_record_is_provided_and_declares_what_is_tested_here() -> None:
    assert list(enginebay_attention_backends()) == [RECORD]
    assert RECORD.name == "torch"
    assert {str(d).removeprefix("torch.") for d in AXES["dtype"]} == set(RECORD.dtypes)
    assert set(RECORD.kv_dtypes) == {*RECORD.dtypes, "float8_e4m3fn"}
    assert AXES["layout"] == RECORD.layouts
    assert RECORD.phases == AXES["phase"]
    assert RECORD.head_dims is None
    assert RECORD.kernel_blocks == (1,)
    assert RECORD.host_lens == "upper_bound"


def test_supports_what_it_declares_and_refuses_the_rest() -> None:
    """C17."""
    spec = AttentionSpec(num_heads=4, num_kv_heads=1, head_dim=72, scale=1.0, window=3, soft_cap=2.0, sinks=True)
    wanted = Requirements(
        hardware=Hardware(device="cpu"),
        dtype="bfloat16",
        kv_dtype="float16",
        attention=(spec,),
        block_size=7,
        graphs=True,
    )
    assert RECORD.supports(wanted).ok
    refused = RECORD.supports(replace(wanted, kv_dtype="float8_e5m2"))
    assert [reason.code for reason in refused.reasons] == ["kv_dtype"]


def test_importing_the_record_imports_no_torch() -> None:
    code = "import sys, enginebay_torch_attention; assert 'torch' not in sys.modules, 'torch was imported'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **paths()})
    assert done.returncode == 0, done.stderr


def paths() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def test_factory_builds_the_backend() -> None:
    backend = RECORD.factory(Case().context)
    assert isinstance(backend, TorchAttention)
    assert isinstance(backend.make_state(Bucket(4, 8)), TorchPlanState)
