"""The flashinfer backend: its record, its host arithmetic, what it tells the library, and what the kernels compute.

Off GPU the library is played by `FakeWrapper`, which attends from what `plan` was told as FlashInfer documents it: CSR
rows, inclusive window_left, causal aligned to the row's end, lse of base 2.

The gpu cases named ``plain`` need only the fa2 and fa3 modules of head sizes 64 and 128 in bfloat16; the others make
FlashInfer compile for up to a minute each unless they are cached.
"""

from __future__ import annotations

import itertools
import math
import sys
import tomllib
import types
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from enginebay.errors import PluginError
from enginebay.interfaces.attention import AttentionContext, AttentionLayer
from enginebay.interfaces.batch import Bucket
from enginebay.plugins.records import HND, NHD, KVLayout, Phase
from enginebay.plugins.requirements import AttentionSpec, Hardware, Requirements
from enginebay_flashinfer import RECORD, FlashInferOptions
from enginebay_flashinfer.backend import FlashInferAttention
from enginebay_flashinfer.paging import HostPlan, gather_blocks
from hypothesis import given
from hypothesis import strategies as st
from paged_step import PagedStep, attention, close_in_16_bits
from pydantic import ValidationError
from torch import Tensor

ROOT = Path(__file__).parents[3]
HAS_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
SPEC = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=64, scale=0.11)


# --- the record ------------------------------------------------------------------------------------------------------


def requirements(**changes: Any) -> Requirements:
    given: dict[str, Any] = {
        "hardware": Hardware(device="cuda", capability=(9, 0)),
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "attention": (SPEC,),
        "graphs": True,
    }
    return Requirements(**given | changes)


def install(monkeypatch: pytest.MonkeyPatch, version: str | None = "0.6.14") -> None:
    """Pretend that the library can be imported, and that its distribution has this version, or is missing."""
    real = metadata.version

    def version_of(name: str) -> str:
        if name != "flashinfer-python":
            return real(name)
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", version_of)
    monkeypatch.setitem(sys.modules, "flashinfer", fake_library())


def reasons(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> set[str]:
    install(monkeypatch)
    return {r.code for r in RECORD.supports(requirements(**changes)).reasons}


def test_a_missing_library_is_a_reason_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    (reason,) = [r for r in RECORD.supports(requirements()).reasons if r.code == "missing_module"]
    assert reason.wanted == "flashinfer"
    assert reason.hint == "pip install 'enginebay[flashinfer]'"


@pytest.mark.parametrize(
    ("version", "found"),
    [(None, "flashinfer-python is not installed"), ("0.6.13", "flashinfer-python 0.6.13 is installed")],
)
def test_a_missing_or_old_distribution_is_a_reason_with_versions_and_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, version: str | None, found: str
) -> None:
    install(monkeypatch, version)
    (reason,) = RECORD.supports(requirements()).reasons
    assert reason.code == "distribution"
    assert reason.detail == f"{found}, needed is flashinfer-python >=0.6.14"
    assert reason.hint == "pip install 'enginebay[flashinfer]'"


def test_the_extra_asks_for_what_the_record_needs() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["flashinfer"] == list(RECORD.requires_dist)


def test_a_later_library_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.10.0")
    assert RECORD.supports(requirements()).ok


def test_a_hopper_run_in_bfloat16_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reasons(monkeypatch) == set()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"hardware": Hardware(device="cpu")}, "device"),
        ({"hardware": Hardware(device="cuda", capability=(7, 5))}, "capability"),
        ({"dtype": "float32", "kv_dtype": "float32"}, "dtype"),
        ({"kv_dtype": "float16"}, "kv_dtype"),
        ({"kv_dtype": "float8_e5m2"}, "kv_dtype"),
        ({"attention": (AttentionSpec(num_heads=4, num_kv_heads=4, head_dim=80, scale=1.0),)}, "head_dim"),
        ({"attention": (AttentionSpec(num_heads=4, num_kv_heads=4, head_dim=64, scale=1.0, sinks=True),)}, "sinks"),
    ],
)
def test_what_is_not_declared_is_refused_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], code: str
) -> None:
    """C17."""
    assert code in reasons(monkeypatch, **changes)


def test_mixed_sixteen_bit_dtypes_are_refused_though_each_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reasons(monkeypatch, dtype="float16", kv_dtype="bfloat16") == {"kv_dtype"}


def test_an_fp8_cache_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reasons(monkeypatch, kv_dtype="float8_e4m3fn") == set()


def test_unknown_and_impossible_options_are_refused() -> None:
    with pytest.raises(ValidationError):
        FlashInferOptions.model_validate({"workspace": 1})
    with pytest.raises(ValidationError):
        FlashInferOptions.model_validate({"workspace_bytes": 1000})


# --- host arithmetic -------------------------------------------------------------------------------------------------

lengths = st.lists(st.integers(1, 300), min_size=1, max_size=12)


def host_plan(seq_lens: list[int], block_size: int) -> HostPlan:
    rows = len(seq_lens)
    starts = np.arange(rows + 1, dtype=np.int32)
    return HostPlan.of(np.array(seq_lens, dtype=np.int32), starts, block_size, pin=False)


@given(lengths, st.integers(1, 64))
def test_blocks_and_last_lengths_give_back_the_lengths(seq_lens: list[int], block_size: int) -> None:
    plan = host_plan(seq_lens, block_size)
    blocks = plan.indptr.diff()
    assert plan.indptr[0] == 0
    assert plan.num_blocks == plan.indptr[-1] == sum(-(-n // block_size) for n in seq_lens)
    assert ((plan.last_page_len >= 1) & (plan.last_page_len <= block_size)).all()
    assert ((blocks - 1) * block_size + plan.last_page_len).tolist() == seq_lens == plan.seq_lens.tolist()
    assert plan.query_indptr.tolist() == list(range(len(seq_lens) + 1))
    assert {t.dtype for t in (plan.indptr, plan.last_page_len, plan.seq_lens, plan.query_indptr)} == {torch.int32}


@given(lengths, st.integers(1, 64), st.integers(0, 3), st.integers(0, 2**31 - 1))
def test_block_ids_are_gathered_row_after_row(seq_lens: list[int], block_size: int, spare: int, seed: int) -> None:
    plan = host_plan(seq_lens, block_size)
    columns = int(plan.indptr.diff().max()) + spare
    generator = torch.Generator().manual_seed(seed)
    # a view of a larger table, as the core hands out
    table = torch.randint(0, 2**31 - 1, (len(seq_lens), columns + 2), generator=generator, dtype=torch.int32)[
        :, :columns
    ]
    out = torch.full((plan.num_blocks,), -1, dtype=torch.int32)
    gather_blocks(table, plan.indptr, torch.arange(plan.num_blocks, dtype=torch.int32), out)
    expected = [table[row, :count] for row, count in enumerate(plan.indptr.diff().tolist())]
    assert torch.equal(out, torch.cat(expected))


# --- a step and its reference ----------------------------------------------------------------------------------------


class Step(PagedStep):
    def __init__(self, seq_lens: list[int], query_lens: list[int], *, spec: AttentionSpec = SPEC, **rest: Any) -> None:
        super().__init__(seq_lens, query_lens, spec=spec, **rest)

    def context(
        self, phase: Phase, *, layout: KVLayout = NHD, max_num_rows: int = 8, **options: Any
    ) -> AttentionContext:
        checked = FlashInferOptions.model_validate(options)
        return self.context_of(phase, checked, max_num_rows=max_num_rows, layout=layout)


# --- what the library is told, off GPU -------------------------------------------------------------------------------


class FakeWrapper:
    """Plays both wrappers of FlashInfer by their documentation, in float32 on the CPU."""

    made: list[FakeWrapper]

    def __init__(self, workspace: Tensor, kv_layout: str, **settings: Any) -> None:
        self.workspace, self.kv_layout, self.settings = workspace, kv_layout, settings
        self.planned: dict[str, Any] = {}
        type(self).made.append(self)

    def reset_workspace_buffer(self, float_workspace: Tensor, int_workspace: Tensor) -> None:
        self.workspace, self.int_workspace = float_workspace, int_workspace

    def _plan(
        self, query_indptr: Tensor, indptr: Tensor, indices: Tensor, last: Tensor, *shape: int, **rest: Any
    ) -> None:
        assert len(indices) == indptr[-1]
        fixed = self.settings.get("paged_kv_last_page_len_buffer")
        assert fixed is None or len(fixed) == len(last)
        names = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")
        self.planned = dict(zip(names, shape, strict=True)) | rest
        self.rows = []
        for row, (start, end) in enumerate(itertools.pairwise(indptr.tolist())):
            length = (end - start - 1) * self.planned["page_size"] + int(last[row])
            assert length == rest["seq_lens"][row]
            self.rows.append((*query_indptr[row : row + 2].tolist(), indices[start:end].clone(), length))

    def run(
        self,
        query: Tensor,
        cache: Tensor,
        *,
        out: Tensor,
        lse: Tensor | None = None,
        return_lse: bool = False,
        k_scale: float = 1.0,
    ) -> None:
        assert (lse is not None) == return_lse
        assert out.is_contiguous()
        planned = self.planned
        if self.kv_layout == "HND":
            cache = cache.transpose(2, 3)
        assert cache.shape[2:] == (planned["page_size"], planned["num_kv_heads"], planned["head_dim"])
        window = planned["window_left"]
        spec = AttentionSpec(
            num_heads=planned["num_qo_heads"],
            num_kv_heads=planned["num_kv_heads"],
            head_dim=planned["head_dim"],
            scale=planned["sm_scale"] * k_scale,
            window=None if window == -1 else window + 1,
            soft_cap=planned["logits_soft_cap"],
        )
        for start, end, blocks, length in self.rows:
            key, value = cache[blocks.long()].float().transpose(0, 1).flatten(1, 2)[:, :length]
            result, natural = attention(query[start:end], key, value, spec)
            out[start:end] = result
            if lse is not None:
                lse[start:end] = natural / math.log(2)


class FakePrefillWrapper(FakeWrapper):
    def plan(
        self, query_indptr: Tensor, indptr: Tensor, indices: Tensor, last: Tensor, *shape: int, **rest: Any
    ) -> None:
        assert rest.pop("causal")
        self._plan(query_indptr, indptr, indices, last, *shape, **rest)


class FakeDecodeWrapper(FakeWrapper):
    def plan(self, indptr: Tensor, indices: Tensor, last: Tensor, *shape: int, **rest: Any) -> None:
        assert self.settings["use_tensor_cores"]
        self._plan(torch.arange(len(indptr)), indptr, indices, last, *shape, **rest)


class FakeEvent:
    """Counts: a fence may be waited for only as often as the rule of turns says."""

    log: list[tuple[str, FakeEvent]]

    def record(self) -> None:
        type(self).log.append(("record", self))

    def synchronize(self) -> None:
        type(self).log.append(("wait", self))


def fake_library() -> types.ModuleType:
    module = types.ModuleType("flashinfer")
    module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    module.BatchPrefillWithPagedKVCacheWrapper = FakePrefillWrapper  # type: ignore[attr-defined]
    module.BatchDecodeWithPagedKVCacheWrapper = FakeDecodeWrapper  # type: ignore[attr-defined]
    return module


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], list[FakeWrapper]]:
    """Install the fakes for a device of the given capability; returns the wrappers made."""

    def install(capability: tuple[int, int] = (9, 0)) -> list[FakeWrapper]:
        FakeWrapper.made, FakeEvent.log = [], []
        monkeypatch.setitem(sys.modules, "flashinfer", fake_library())
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        return FakeWrapper.made

    return install


Install = Callable[..., list[FakeWrapper]]
SPECS = {
    "plain": SPEC,
    "window": AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=64, scale=0.11, window=20),
    "soft_cap": AttentionSpec(num_heads=4, num_kv_heads=4, head_dim=64, scale=0.2, soft_cap=2.0),
}


@pytest.mark.parametrize("layout", [NHD, HND], ids=["NHD", "HND"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_step_told_to_the_library_is_the_step(
    library: Install, phase: Phase, spec: AttentionSpec, layout: KVLayout
) -> None:
    library()
    seq_lens = [1, 16, 17, 70]
    query_lens = [1, 1, 1, 1] if phase == "decode" else [1, 16, 5, 33]
    step = Step(seq_lens, query_lens, spec=spec, layout=layout)
    backend = FlashInferAttention(step.context(phase, layout=layout))
    out, lse = step.run(backend, backend.make_state(Bucket(rows=8, query_len=64)))
    expected, expected_lse = step.reference()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_an_fp8_cache_is_scaled_back(library: Install, phase: Phase) -> None:
    library()
    query_lens = [1, 1, 1] if phase == "decode" else [7, 30, 2]
    step = Step([7, 40, 33], query_lens, kv_dtype=torch.float8_e4m3fn, scales=(0.5, 3.0))
    backend = FlashInferAttention(step.context(phase))
    out, lse = step.run(backend, backend.make_state(Bucket(8, max(query_lens))))
    expected, expected_lse = step.reference()
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


def test_results_reach_an_output_that_is_not_dense(library: Install) -> None:
    library()
    step = Step([9, 40], [1, 1])
    backend = FlashInferAttention(step.context("decode"))
    state = backend.make_state(Bucket(rows=8, query_len=1))
    backend.plan(step.batch, state)
    wide = torch.full((2, SPEC.num_heads, 2 * SPEC.head_dim), math.nan)
    out = wide[..., : SPEC.head_dim]
    backend.attend(AttentionLayer(0, SPEC), step.query, step.cache, step.batch, state, out)
    torch.testing.assert_close(out, step.reference()[0])
    assert wide[..., SPEC.head_dim :].isnan().all()


def test_a_captured_bucket_gets_fixed_buffers_of_its_size_shared_by_both_turns(library: Install) -> None:
    made = library()
    step = Step([3, 30, 1, 1], [1, 1, 1, 1])  # two real rows, two of padding
    backend = FlashInferAttention(step.context("decode"))
    state = backend.make_state(Bucket(rows=4, query_len=1, captured=True))
    first, second = (w.settings for w in made)
    assert first["use_cuda_graph"]
    assert len(first["paged_kv_indptr_buffer"]) == 5
    for name in ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"):
        assert first[name].data_ptr() == second[name].data_ptr()
    assert made[0].int_workspace.data_ptr() == made[1].int_workspace.data_ptr()
    out, _ = step.run(backend, state)
    torch.testing.assert_close(out, step.reference()[0])


@pytest.mark.parametrize(("phase", "query_len"), [("decode", 2), ("prefill", 1)])
def test_other_steps_cannot_be_captured(library: Install, phase: Phase, query_len: int) -> None:
    library()
    backend = FlashInferAttention(Step([3], [1]).context(phase))
    with pytest.raises(PluginError, match="run longer steps eagerly"):
        backend.make_state(Bucket(rows=4, query_len=query_len, captured=True))


def test_turns_alternate_and_wait_only_for_the_plan_before_the_last(library: Install) -> None:
    """Two steps in flight: the pinned memory of step n is written again at step n + 2."""
    made = library()
    step = Step([5], [1])
    backend = FlashInferAttention(step.context("decode"))
    state = backend.make_state(Bucket(rows=8, query_len=1))
    used = []
    for _ in range(4):
        backend.plan(step.batch, state)
        used.append(made.index(state.turns[0].wrapper))
    assert used[0] != used[1]
    assert used == used[:2] * 2
    waits = [event for what, event in FakeEvent.log if what == "wait"]
    records = [event for what, event in FakeEvent.log if what == "record"]
    assert waits == records
    assert [what for what, _ in FakeEvent.log] == ["wait", "record"] * 4
    assert waits[2] is records[0]
    assert waits[2] is not records[1]


@pytest.mark.parametrize(
    ("capability", "option", "kernel"),
    [((9, 0), "auto", "auto"), ((8, 0), "auto", "fa2"), ((10, 0), "auto", "fa2"), ((9, 0), "fa2", "fa2")],
)
def test_prefill_takes_fa3_on_hopper_alone(
    library: Install, capability: tuple[int, int], option: str, kernel: str
) -> None:
    made = library(capability)
    FlashInferAttention(Step([3], [3]).context("prefill", prefill_kernel=option)).make_state(Bucket(8, 64))
    assert {w.settings["backend"] for w in made} == {kernel}


def test_prefill_over_fp8_takes_fa2(library: Install) -> None:
    made = library((9, 0))
    step = Step([3], [3], kv_dtype=torch.float8_e4m3fn)
    FlashInferAttention(step.context("prefill")).make_state(Bucket(8, 64))
    assert {w.settings["backend"] for w in made} == {"fa2"}
    with pytest.raises(PluginError, match="fa3 reads no fp8 cache"):
        FlashInferAttention(step.context("prefill", prefill_kernel="fa3")).make_state(Bucket(8, 64))


def test_decode_never_takes_fa3(library: Install) -> None:
    made = library((9, 0))
    FlashInferAttention(Step([3], [1]).context("decode", prefill_kernel="fa3")).make_state(Bucket(8, 1))
    assert {w.settings["backend"] for w in made} == {"fa2"}


def test_fa3_off_hopper_is_refused(library: Install) -> None:
    library((8, 0))
    backend = FlashInferAttention(Step([3], [3]).context("prefill", prefill_kernel="fa3"))
    with pytest.raises(PluginError, match="needs a Hopper GPU"):
        backend.make_state(Bucket(8, 64))


def test_an_undeclared_layout_is_refused() -> None:
    odd = KVLayout("odd", ("kv", "blocks", "block", "kv_heads", "head_dim"))
    with pytest.raises(PluginError, match="NHD and HND"):
        FlashInferAttention(Step([3], [1]).context("decode", layout=odd))


def test_workspace_counts_every_buffer_it_holds(library: Install) -> None:
    library()
    small = FlashInferAttention(Step([3], [1]).context("decode", workspace_bytes=2**20))
    large = FlashInferAttention(Step([3], [1]).context("decode", workspace_bytes=2**24))
    bucket = Bucket(8, 1)
    assert large.workspace_bytes(bucket) - small.workspace_bytes(bucket) == 2**24 - 2**20
    held = sum(v.nbytes for v in vars(small).values() if isinstance(v, Tensor))
    assert small.workspace_bytes(bucket) > held


# --- the kernels, on a GPU -------------------------------------------------------------------------------------------

GPU_SPECS = {
    "plain-8b": AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5),
    "plain-smol": AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125),
    "window": AttentionSpec(num_heads=16, num_kv_heads=8, head_dim=128, scale=0.1, window=100),
    "soft_cap": AttentionSpec(num_heads=8, num_kv_heads=8, head_dim=128, scale=0.2, soft_cap=5.0),
}
gpu_specs = pytest.mark.parametrize("spec", GPU_SPECS.values(), ids=GPU_SPECS.keys())
gpu_layouts = pytest.mark.parametrize("layout", [NHD, HND], ids=["NHD", "HND"])


def gpu_step(seq_lens: list[int], query_lens: list[int], spec: AttentionSpec, **rest: Any) -> Step:
    return Step(
        seq_lens,
        query_lens,
        spec=spec,
        max_model_len=2048,
        dtype=torch.bfloat16,
        device="cuda",
        seed=len(seq_lens),
        **rest,
    )


@pytest.mark.gpu
@needs_gpu
@gpu_layouts
@gpu_specs
def test_gpu_decode_agrees_with_float32(spec: AttentionSpec, layout: KVLayout) -> None:
    step = gpu_step([1, 16, 17, 900, 1500, 64, 333], [1] * 7, spec, layout=layout)
    backend = FlashInferAttention(step.context("decode", layout=layout))
    close_in_16_bits(step, *step.run(backend, backend.make_state(Bucket(8, 1))))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_gpu_an_fp8_cache_agrees_with_float32(phase: Phase) -> None:
    query_lens = [1, 1, 1] if phase == "decode" else [300, 20, 1]
    step = gpu_step([300, 900, 17], query_lens, GPU_SPECS["plain-8b"], kv_dtype=torch.float8_e4m3fn, scales=(0.5, 3.0))
    backend = FlashInferAttention(step.context(phase))
    close_in_16_bits(step, *step.run(backend, backend.make_state(Bucket(8, 2048))))


@pytest.mark.gpu
@needs_gpu
@gpu_layouts
@gpu_specs
def test_gpu_prefill_agrees_with_float32(spec: AttentionSpec, layout: KVLayout) -> None:
    """Whole prompts, chunks behind a context, a single token: long queries for fa3, short ones for fa2."""
    for seq_lens, query_lens in (
        ([300, 900, 1500, 17, 129], [300, 400, 1, 5, 128]),
        ([33, 700], [20, 1]),
    ):
        step = gpu_step(seq_lens, query_lens, spec, layout=layout)
        backend = FlashInferAttention(step.context("prefill", layout=layout))
        close_in_16_bits(step, *step.run(backend, backend.make_state(Bucket(8, 2048))))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("spec", [GPU_SPECS["plain-8b"], GPU_SPECS["plain-smol"]], ids=["plain-8b", "plain-smol"])
def test_gpu_a_captured_step_replays_after_each_new_plan(spec: AttentionSpec) -> None:
    """One graph, replayed under plans of both turns and of another bucket in between."""
    rows = 4
    steps = [
        gpu_step(lens, [1] * rows, spec) for lens in ([5, 1, 1, 1], [900, 64, 17, 1], [6, 1500, 1, 2], [2, 2, 2, 2])
    ]
    backend = FlashInferAttention(steps[0].context("decode"))
    state = backend.make_state(Bucket(rows, 1, captured=True))
    other = backend.make_state(Bucket(2, 1, captured=True))
    # the graph's inputs keep their addresses; each step is copied into them
    query = torch.zeros_like(steps[0].query)
    cache = torch.zeros((max(len(s.cache) for s in steps), *steps[0].cache.shape[1:]), dtype=query.dtype, device="cuda")
    out = torch.zeros(query.shape, dtype=query.dtype, device="cuda")
    lse = torch.zeros(query.shape[:2], device="cuda")

    def attend() -> None:
        backend.attend(AttentionLayer(0, spec), query, cache, steps[0].batch, state, out, lse)

    backend.plan(steps[0].batch, state)
    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    small = gpu_step([40, 3], [1, 1], spec)
    for step in [*steps, *steps[::-1]]:
        backend.plan(small.batch, other)
        backend.plan(step.batch, state)
        query.copy_(step.query)
        cache[: len(step.cache)].copy_(step.cache)
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        close_in_16_bits(step, out, lse)


@pytest.mark.gpu
@needs_gpu
def test_gpu_plain_steps_in_flight_do_not_mix() -> None:
    """Many steps planned and run without waiting, each result as if alone."""
    spec = GPU_SPECS["plain-8b"]
    steps = [gpu_step([1 + (37 * i * (r + 1)) % 1900 for r in range(6)], [1] * 6, spec) for i in range(12)]
    backend = FlashInferAttention(steps[0].context("decode"))
    state = backend.make_state(Bucket(6, 1, captured=True))
    burn = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    results = []
    for step in steps:
        for _ in range(20):  # keeps the device behind the host
            burn = (burn @ burn).clamp_(-1, 1)
        results.append(step.run(backend, state))
    for step, (out, lse) in zip(steps, results, strict=True):
        close_in_16_bits(step, out, lse)
