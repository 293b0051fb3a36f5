"""The triton backend: its record, its plan of splits, and its kernels, under Triton's interpreter where there is no GPU.

bfloat16 is left to the GPU: the interpreter computes it wrongly, without a word.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from enginebay.errors import PluginError
from enginebay.interfaces.batch import Bucket
from enginebay.plugins.records import HND, NHD, KVLayout, NoOptions, Phase
from enginebay.plugins.requirements import FP8, AttentionSpec, Hardware, Requirements
from enginebay_triton_attention import RECORD
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_step import PagedStep, close_in_16_bits

pytest.importorskip("triton")
from enginebay_triton_attention.backend import TritonAttention
from enginebay_triton_attention.split_plan import SplitPlan, max_items, plan_splits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPECS = {
    "plain": AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=64, scale=0.11),
    "seven-heads": AttentionSpec(num_heads=7, num_kv_heads=1, head_dim=96, scale=0.1),
    "window": AttentionSpec(num_heads=4, num_kv_heads=4, head_dim=64, scale=0.11, window=20),
    "soft_cap": AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.4, soft_cap=3.0),
    "sinks": AttentionSpec(num_heads=4, num_kv_heads=1, head_dim=128, scale=0.1, sinks=True),
    "everything": AttentionSpec(
        num_heads=6, num_kv_heads=2, head_dim=80, scale=0.3, window=70, soft_cap=4.0, sinks=True
    ),
}
PHASES: dict[Phase, list[int]] = {"decode": [1, 1, 1, 1], "prefill": [5, 1, 16, 150]}
LENGTHS = [5, 1, 48, 450]


def backend_of(step: PagedStep, phase: Phase) -> TritonAttention:
    return TritonAttention(step.context_of(phase, NoOptions(), max_num_rows=8))


# --- the record ------------------------------------------------------------------------------------------------------


def codes(**changes: Any) -> set[str]:
    given: dict[str, Any] = {
        "hardware": Hardware(device="cuda", capability=(9, 0)),
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "attention": tuple(SPECS.values()),
        "graphs": True,
    }
    return {reason.code for reason in RECORD.supports(Requirements(**given | changes)).reasons}


def test_a_hopper_run_is_supported_over_caches_of_its_dtype_and_of_fp8() -> None:
    assert codes() == codes(kv_dtype=FP8) == set()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"hardware": Hardware(device="cpu")}, "device"),
        ({"hardware": Hardware(device="cuda", capability=(7, 5))}, "capability"),
        ({"hardware": Hardware(device="cuda", capability=(8, 6)), "kv_dtype": FP8}, "kv_dtype"),
        ({"dtype": "float32", "kv_dtype": "float32"}, "dtype"),
        ({"kv_dtype": "float16"}, "kv_dtype"),
        ({"block_size": 24}, "block_size"),
        ({"attention": (AttentionSpec(num_heads=4, num_kv_heads=4, head_dim=72, scale=1.0),)}, "head_dim"),
    ],
)
def test_what_is_not_declared_is_refused_with_a_reason(changes: dict[str, Any], code: str) -> None:
    """C17."""
    assert code in codes(**changes)


# --- the plan --------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=8),
    st.integers(1, 40),
    st.sampled_from([None, 1, 100]),
    st.sampled_from([16, 64]),
)
def test_items_cover_each_rows_visible_tokens_once(
    lengths: list[int], wanted: int, window: int | None, tile: int
) -> None:
    plan = SplitPlan.empty(8, wanted, torch.device(DEVICE))
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    plan_splits(seq_lens, plan, wanted=wanted, window=window, tile=tile, min_split=tile)
    total = int(plan.total)
    assert total <= max_items(len(lengths), wanted)
    items = list(zip(plan.row.tolist(), plan.begin.tolist(), plan.end.tolist(), strict=True))[:total]
    for row, length in enumerate(lengths):
        first, count = int(plan.first_item[row]), int(plan.num_items[row])
        at = 0 if window is None else max(0, length - window)
        for of_row, begin, end in items[first : first + count]:
            assert (of_row, begin) == (row, at)
            assert end > begin
            at = end
        assert at == length
    assert total == int(plan.num_items[: len(lengths)].sum())


# --- the kernels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [NHD, HND], ids=["NHD", "HND"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("phase", PHASES)
def test_float32_agrees_with_the_definition(phase: Phase, spec: AttentionSpec, layout: KVLayout) -> None:
    step = PagedStep(LENGTHS, PHASES[phase], spec=spec, layout=layout, device=DEVICE)
    out, lse = step.run(backend_of(step, phase))
    expected, expected_lse = step.reference()
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("phase", PHASES)
def test_float16_agrees_over_blocks_of_any_size(phase: Phase, block_size: int) -> None:
    step = PagedStep(
        LENGTHS, PHASES[phase], spec=SPECS["plain"], block_size=block_size, dtype=torch.float16, device=DEVICE
    )
    close_in_16_bits(step, *step.run(backend_of(step, phase)))


@pytest.mark.parametrize("phase", PHASES)
def test_what_lies_behind_a_row_never_leaks(phase: Phase) -> None:
    step = PagedStep([5, 1, 40, 130], [1, 1, 1, 1], spec=SPECS["plain"], device=DEVICE)
    clean, _ = step.run(backend_of(step, phase), with_lse=False)
    for row, length in enumerate([5, 1, 40, 130]):
        last = int(step.batch.groups[0].block_table[row, (length - 1) // 16])
        step.cache[last, :, (length - 1) % 16 + 1 :] = torch.nan
    dirty, _ = step.run(backend_of(step, phase), with_lse=False)
    assert torch.equal(clean, dirty)


@pytest.mark.parametrize(("phase", "query_len"), [("decode", 2), ("prefill", 1)])
def test_other_steps_cannot_be_captured(phase: Phase, query_len: int) -> None:
    step = PagedStep([3], [1], spec=SPECS["plain"], device=DEVICE)
    with pytest.raises(PluginError, match="captures decode steps of one token"):
        backend_of(step, phase).make_state(Bucket(8, query_len, captured=True))


def test_workspace_counts_every_buffer_of_decode() -> None:
    step = PagedStep([3], [1], spec=SPECS["plain"], device=DEVICE)
    assert backend_of(step, "decode").workspace_bytes(Bucket(8, 1)) > 0
    assert backend_of(step, "prefill").workspace_bytes(Bucket(8, 64)) == 0
