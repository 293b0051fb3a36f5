"""The flash_attention backend: its record, what it hands to the library, and what the kernels compute.

Off GPU the library is played by `flash_attn_fwd`, which attends as the library's inner function documents: paged keys,
ragged or single queries, causal aligned to the row's end, inclusive window_size_left, natural-log lse by heads.
"""

from __future__ import annotations

import itertools
import math
import sys
import types
from collections.abc import Callable
from importlib import metadata
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch
from enginebay.config.problems import validate_options
from enginebay.errors import ConfigError, PluginError
from enginebay.interfaces.batch import Bucket
from enginebay.plugins.records import HND, NHD, KVLayout, Phase
from enginebay.plugins.requirements import AttentionSpec, Hardware, Reason, Requirements
from enginebay_flash_attention import RECORD, FlashAttentionOptions
from enginebay_flash_attention.backend import FlashAttention
from hypothesis import given
from hypothesis import strategies as st
from paged_step import PagedStep, attention, close_in_16_bits
from torch import Tensor


def spec_of(heads: int = 8, kv_heads: int = 2, head_dim: int = 64, scale: float = 0.11, **rest: Any) -> AttentionSpec:
    return AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=scale, **rest)


SPEC = spec_of()
FEATURES = {
    "plain": SPEC,
    "mha": spec_of(4, 4),
    "window": spec_of(window=7),
    "soft_cap": spec_of(scale=0.4, soft_cap=3.0),
    "sinks": spec_of(sinks=True),
    "everything": spec_of(6, 2, 96, scale=0.3, window=20, soft_cap=4.0, sinks=True),
}


# --- the record ------------------------------------------------------------------------------------------------------

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Pretend that distributions of these versions are installed, and no others of their kind."""

    def pretend(versions: dict[str, str]) -> None:
        real = metadata.version

        def version(name: str) -> str:
            if name in versions:
                return versions[name]
            if name.startswith("flash-attn"):
                raise metadata.PackageNotFoundError(name)
            return real(name)

        monkeypatch.setattr(metadata, "version", version)
        cutlass = types.ModuleType("cutlass")
        cutlass.__spec__ = ModuleSpec("cutlass", None)
        monkeypatch.setitem(sys.modules, "cutlass", cutlass)

    return pretend


GOOD = {"flash-attn-4": "4.0.0b36"}


def requirements(**changes: Any) -> Requirements:
    given: dict[str, Any] = {
        "hardware": Hardware(device="cuda", capability=(9, 0)),
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "attention": (SPEC,),
        "max_num_seqs": 256,
        "graphs": True,
    }
    return Requirements(**given | changes)


def reasons(**changes: Any) -> dict[str, Reason]:
    return {r.code: r for r in RECORD.supports(requirements(**changes)).reasons}


def test_a_hopper_run_in_bfloat16_is_supported(install: Install) -> None:
    install(GOOD)
    assert reasons() == {}
    assert reasons(attention=tuple(FEATURES.values())) == {}


def test_prefill_is_its_strength() -> None:
    assert RECORD.phase_priorities() == {"decode": 15, "prefill": 30}


@pytest.mark.parametrize(
    ("versions", "found"),
    [
        ({}, "flash-attn-4 is not installed"),
        ({"flash-attn-4": "4.0.0b20"}, "flash-attn-4 4.0.0b20 is installed"),
        ({"flash-attn-4": "4.1.0"}, "flash-attn-4 4.1.0 is installed"),
    ],
)
def test_a_library_that_is_missing_or_was_not_run_is_a_reason_with_versions_and_the_line_that_installs_it(
    install: Install, versions: dict[str, str], found: str
) -> None:
    install(versions)
    reason = reasons()["distribution"]
    assert found in reason.detail
    assert "4.0.0b36" in reason.detail
    assert reason.hint == "pip install 'enginebay[flash-attn]'"


def test_flash_attention_2_is_told_apart_by_name(install: Install) -> None:
    install({"flash-attn": "2.8.3"})
    assert "flash-attn 2.8.3 is FlashAttention-2" in reasons()["library"].detail
    install({"flash-attn": "2.8.3", **GOOD})
    assert reasons() == {}


def test_a_path_without_cutlass_is_a_reason(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(GOOD)
    monkeypatch.setitem(sys.modules, "cutlass", None)
    assert reasons()["missing_module"].wanted == "cutlass"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"hardware": Hardware(device="cpu")}, "device"),
        ({"hardware": Hardware(device="cuda", capability=(8, 9))}, "capability"),
        ({"hardware": Hardware(device="cuda", capability=(10, 0))}, "capability"),
        ({"hardware": Hardware(device="cuda", capability=(12, 0))}, "capability"),
        ({"dtype": "float32", "kv_dtype": "float32"}, "dtype"),
        ({"kv_dtype": "float16"}, "kv_dtype"),
        ({"kv_dtype": "float8_e4m3fn"}, "kv_dtype"),
        ({"attention": (spec_of(head_dim=80),)}, "head_dim"),
    ],
)
def test_what_is_not_declared_is_refused_with_a_reason(install: Install, changes: dict[str, Any], code: str) -> None:
    """C17."""
    install(GOOD)
    assert code in reasons(**changes)


def test_a_gpu_on_which_it_was_not_run_is_refused_saying_what_to_use(install: Install) -> None:
    install(GOOD)
    text = str(reasons(hardware=Hardware(device="cuda", capability=(10, 0)))["capability"])
    assert "run on sm_90 only, not on sm_100" in text
    assert "use flashinfer or triton" in text


@given(st.integers(1, 300), st.integers(1, 64))
def test_decode_is_declined_exactly_where_rows_and_heads_leave_the_gpu_idle(rows: int, kv_heads: int) -> None:
    spec = spec_of(kv_heads, kv_heads)
    declined = "decode_occupancy" in reasons(max_num_seqs=rows, attention=(spec,))
    assert declined == (rows * kv_heads < 132)
    assert "decode_occupancy" not in reasons(max_num_seqs=rows, attention=(spec,), phases=("prefill",))


def test_a_declined_decode_says_the_numbers_and_what_to_set(install: Install) -> None:
    install(GOOD)
    found = reasons(max_num_seqs=16)
    assert set(found) == {"decode_occupancy"}
    text = str(found["decode_occupancy"])
    assert "16 rows x 2 KV heads are 32 blocks for 132 multiprocessors" in text
    assert "attention.backend.decode: flashinfer or triton" in text


@pytest.mark.parametrize("version", ["auto", 4])
def test_version_4_and_auto_are_options(version: object) -> None:
    assert FlashAttentionOptions.model_validate({"version": version}).version == version


@pytest.mark.parametrize("version", [2, 3])
def test_older_generations_are_refused_by_name(version: int) -> None:
    with pytest.raises(ConfigError, match=rf"FlashAttention-{version} .*version: 4 or auto.*flashinfer"):
        validate_options(FlashAttentionOptions, {"version": version}, "attention.options")


@pytest.mark.parametrize("options", [{"version": 5}, {"version": "4"}, {"splits": 2}])
def test_unknown_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"attention\.options\."):
        validate_options(FlashAttentionOptions, options, "attention.options")


# --- a step and its reference ----------------------------------------------------------------------------------------


class Step(PagedStep):
    def __init__(self, seq_lens: list[int], query_lens: list[int], *, spec: AttentionSpec = SPEC, **rest: Any) -> None:
        super().__init__(seq_lens, query_lens, spec=spec, **rest)

    def backend(self, phase: Phase) -> FlashAttention:
        return FlashAttention(self.context_of(phase, FlashAttentionOptions(), max_num_rows=512))


# --- what the library is told, off GPU -------------------------------------------------------------------------------


def flash_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    seqused_k: Tensor,
    page_table: Tensor,
    softmax_scale: float,
    causal: bool = False,
    window_size_left: int | None = None,
    learnable_sink: Tensor | None = None,
    score_mod: float | None = None,
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    """The library's inner function by its documentation, in float32 on the CPU; `score_mod` is the soft cap."""
    assert causal
    assert k.stride(-1) == v.stride(-1) == out.stride(-1) == 1
    assert {t.dtype for t in (seqused_k, page_table)} == {torch.int32}
    rows, heads = len(seqused_k), q.shape[-2]
    if cu_seqlens_q is None:
        assert q.shape[0] == out.shape[0] == rows
        assert lse is None or lse.shape == (rows, heads, q.shape[1])
        pieces = [(q[r], out[r], None if lse is None else lse[r]) for r in range(rows)]
    else:
        assert lse is None or (lse.shape == (heads, len(q)) and lse.stride(-1) == 1)
        bounds = cu_seqlens_q.tolist()
        pieces = [(q[a:b], out[a:b], None if lse is None else lse[:, a:b]) for a, b in itertools.pairwise(bounds)]
    spec = AttentionSpec(
        num_heads=heads,
        num_kv_heads=k.shape[2],
        head_dim=k.shape[3],
        scale=softmax_scale,
        window=None if window_size_left is None else window_size_left + 1,
        soft_cap=score_mod,
    )
    for row, (query, result, row_lse) in enumerate(pieces):
        length = int(seqused_k[row])
        blocks = page_table[row, : -(-length // k.shape[1])].long()
        key, value = (half[blocks].float().flatten(0, 1)[:length] for half in (k, v))
        answer, natural = attention(query.float(), key, value, spec, learnable_sink)
        result.copy_(answer)
        if row_lse is not None:
            row_lse.copy_(natural.T)


@pytest.fixture
def library(install: Install, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The fake library; its module, to be changed."""
    install(GOOD)
    interface: Any = types.ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd = flash_attn_fwd
    utils: Any = types.ModuleType("flash_attn.cute.utils")
    utils.create_softcap_scoremod = float
    cute: Any = types.ModuleType("flash_attn.cute")
    cute.interface, cute.utils = interface, utils
    for module in (types.ModuleType("flash_attn"), cute, interface, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return interface


specs = pytest.mark.parametrize("spec", FEATURES.values(), ids=FEATURES.keys())
layouts = pytest.mark.parametrize("layout", [NHD, HND], ids=["NHD", "HND"])


@specs
@layouts
@pytest.mark.usefixtures("library")
def test_decode_and_prefill_agree_with_the_definition(spec: AttentionSpec, layout: KVLayout) -> None:
    for phase, query_lens in (("decode", [1, 1, 1, 1]), ("prefill", [5, 1, 16, 33])):
        step = Step([5, 1, 48, 70], query_lens, spec=spec, layout=layout)
        out, lse = step.run(step.backend(phase))  # type: ignore[arg-type]
        expected, expected_lse = step.reference()
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, expected_lse)


@layouts
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_the_library_reads_the_cache_and_writes_the_output_in_place(
    library: Any, phase: Phase, layout: KVLayout
) -> None:
    told: dict[str, Any] = {}

    def fwd(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Any,
        seqused_k: Any,
        page_table: Any,
        softmax_scale: Any,
        causal: Any,
        learnable_sink: Any,
        out: Tensor,
        lse: Any,
    ) -> None:
        told.update(q=q, k=k, v=v, seqused_k=seqused_k, page_table=page_table, out=out.fill_(2.0), lse=lse)

    library._flash_attn_fwd = fwd
    step = Step([9, 20], [1, 1], layout=layout)
    out, _ = step.run(step.backend(phase), with_lse=False)
    assert told["k"].data_ptr() == step.cache[:, 0].data_ptr()
    assert told["v"].data_ptr() == step.cache[:, 1].data_ptr()
    assert told["q"].data_ptr() == step.query.data_ptr()
    assert told["seqused_k"] is step.batch.seq_lens
    assert told["page_table"] is step.batch.groups[0].block_table
    assert told["lse"] is None
    assert (out == 2.0).all()


@pytest.mark.usefixtures("library")
def test_an_undeclared_layout_is_refused() -> None:
    odd = KVLayout("odd", ("kv", "blocks", "block", "kv_heads", "head_dim"))
    with pytest.raises(PluginError, match="NHD and HND"):
        Step([3], [1], layout=odd).backend("decode")


@pytest.mark.usefixtures("library")
def test_workspace_is_what_a_call_allocates() -> None:
    step = Step([3], [1])
    assert step.backend("decode").workspace_bytes(Bucket(256, 1)) == 0
    prefill = step.backend("prefill")
    lse_bytes = 4 * SPEC.num_heads * 4096
    assert prefill.workspace_bytes(Bucket(4, 1024)) > lse_bytes
    # the context's tokens bound the bucket's
    assert prefill.workspace_bytes(Bucket(4, 4096)) == prefill.workspace_bytes(Bucket(4, 1024))


# --- the kernels, on a GPU -------------------------------------------------------------------------------------------


def runs_here() -> bool:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return False
    try:
        metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return False
    return True


needs_gpu = pytest.mark.skipif(not runs_here(), reason="needs a Hopper GPU and flash-attn-4")
GPU_SPECS = {
    "8b": spec_of(32, 8, 128, 128**-0.5),
    "smol": spec_of(9, 3, 64, 0.125),
    "mha": spec_of(8, 8, 128, 0.1),
    "mqa": spec_of(8, 1, 128, 0.1),
    "d96": spec_of(8, 2, 96, 0.1),
    "d192": spec_of(8, 2, 192, 0.07),
    "d256": spec_of(4, 1, 256, 0.0625),
    "window": spec_of(16, 8, 128, 0.1, window=100),
    "window-d256": spec_of(4, 1, 256, 0.0625, window=512),
    "soft_cap": spec_of(8, 8, 128, 0.2, soft_cap=5.0),
    "sinks": spec_of(16, 2, 64, 0.125, sinks=True),
    "everything": spec_of(16, 2, 128, 0.1, window=300, soft_cap=20.0, sinks=True),
}
gpu_specs = pytest.mark.parametrize("spec", GPU_SPECS.values(), ids=GPU_SPECS.keys())


def gpu_step(seq_lens: list[int], query_lens: list[int], spec: AttentionSpec, **rest: Any) -> Step:
    settings: dict[str, Any] = {"dtype": torch.bfloat16, "max_model_len": 2048, "seed": len(seq_lens)} | rest
    return Step(seq_lens, query_lens, spec=spec, device="cuda", **settings)


@pytest.mark.gpu
@needs_gpu
@layouts
@gpu_specs
def test_gpu_decode_agrees_with_float32(spec: AttentionSpec, layout: KVLayout) -> None:
    step = gpu_step([1, 16, 17, 900, 1500, 64, 333], [1] * 7, spec, layout=layout)
    close_in_16_bits(step, *step.run(step.backend("decode")))


@pytest.mark.gpu
@needs_gpu
@layouts
@gpu_specs
def test_gpu_prefill_agrees_with_float32(spec: AttentionSpec, layout: KVLayout) -> None:
    """Whole prompts, chunks behind a context, single tokens."""
    step = gpu_step([300, 900, 1500, 17, 129], [300, 400, 1, 5, 128], spec, layout=layout)
    close_in_16_bits(step, *step.run(step.backend("prefill")))


@pytest.mark.gpu
@needs_gpu
@layouts
@pytest.mark.parametrize(
    ("name", "block_size"),
    [("8b", 1), ("8b", 48), ("8b", 128), ("8b", 256), ("smol", 128), ("d256", 80), ("window-d256", 64)],
)
def test_gpu_any_block_size_agrees_with_float32(name: str, block_size: int, layout: KVLayout) -> None:
    """A key tile is 128 tokens up to head size 128; 80, and 64 with a window, at 256: such blocks are loaded whole."""
    spec = GPU_SPECS[name]
    step = gpu_step([300, 900, 1501], [300, 1, 130], spec, block_size=block_size, layout=layout)
    close_in_16_bits(step, *step.run(step.backend("prefill")))
    step = gpu_step([300, 900, 1501], [1, 1, 1], spec, block_size=block_size, layout=layout)
    close_in_16_bits(step, *step.run(step.backend("decode")))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_gpu_float16_and_many_rows_agree_with_float32(phase: Phase) -> None:
    """Beyond 256 ragged rows the library looks rows up in a table."""
    rows = 300
    query_lens = [1] * rows if phase == "decode" else [1 + r % 5 for r in range(rows)]
    step = gpu_step([6 + r for r in range(rows)], query_lens, GPU_SPECS["8b"], dtype=torch.float16)
    close_in_16_bits(step, *step.run(step.backend(phase)))


@pytest.mark.gpu
@needs_gpu
def test_gpu_a_cache_beyond_32_bit_offsets_is_read_where_it_lies() -> None:
    """Blocks at the end of a cache of 2.5e9 elements."""
    spec = GPU_SPECS["8b"]
    step = gpu_step([40, 700], [20, 1], spec)
    expected, _ = step.reference()
    blocks = len(step.cache)
    shift = 77_000
    big = torch.empty((blocks + shift, *step.cache.shape[1:]), dtype=torch.bfloat16, device="cuda")
    big[shift:].copy_(step.cache)
    step.cache = big
    step.batch.groups[0].block_table.add_(shift)
    out, _ = step.run(step.backend("prefill"))
    assert ((out.float() - expected).norm() / expected.norm()).item() < 1e-2


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["8b", "everything"])
def test_gpu_a_captured_step_replays_over_new_lengths_and_blocks(name: str) -> None:
    rows = 4
    spec = GPU_SPECS[name]
    steps = [gpu_step(lens, [1] * rows, spec) for lens in ([5, 1, 1, 1], [900, 64, 17, 1], [6, 1500, 1, 2])]
    held = gpu_step([2000] * rows, [1] * rows, spec)
    backend = held.backend("decode")
    state = backend.make_state(Bucket(rows, 1, captured=True))
    out = torch.zeros(held.query.shape, dtype=torch.bfloat16, device="cuda")
    lse = torch.zeros(held.query.shape[:2], device="cuda")

    def attend() -> None:
        backend.attend(held.layer, held.query, held.cache, held.batch, state, out, lse)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    for step in steps:
        held.query.copy_(step.query)
        held.cache[: len(step.cache)].copy_(step.cache)
        held.batch.seq_lens.copy_(step.batch.seq_lens)
        held.batch.groups[0].block_table.copy_(step.batch.groups[0].block_table)
        if held.layer.sinks is not None and step.layer.sinks is not None:
            held.layer.sinks.copy_(step.layer.sinks)
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        close_in_16_bits(step, out, lse)
