"""The verdict: a right result passes, a wrong one does not."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from enginebay.conformance.attention import trial
from enginebay.conformance.attention.cases import Case, Work
from enginebay.conformance.attention.steps import (
    Answer,
    Row,
    make_batch,
    make_cache,
    make_layer,
    make_query,
    reference,
)
from enginebay.conformance.attention.trial import check, compare, passed
from enginebay.plugins.records import HND, NHD
from enginebay.plugins.requirements import FP8, AttentionSpec
from enginebay_torch_attention import RECORD

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


def answer_and_result(spec: AttentionSpec, *, dtype: torch.dtype = torch.bfloat16) -> tuple[Answer, torch.Tensor]:
    """A float32 answer, and one that torch's own attention gives in `dtype` for rows of 1, 40 and 200 tokens."""
    generator = torch.Generator().manual_seed(0)
    rows = [Row(n, n) for n in (1, 40, 200)]
    batch, blocks = make_batch(rows, block_size=16, max_model_len=256, device=torch.device("cpu"))
    cache = make_cache(spec, NHD, blocks, 16, dtype, generator)
    query = make_query(spec, batch.num_tokens, dtype, generator)
    layer = make_layer(spec, generator)
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
    return reference(query, cache, batch, layer), torch.cat(outs)


SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torchs_own_attention_passes_and_a_key_too_many_does_not(dtype: torch.dtype) -> None:
    answer, out = answer_and_result(SPEC, dtype=dtype)
    verdict = compare(answer, out, answer.lse, len(out), SPEC)
    assert passed(verdict), verdict
    shifted = torch.cat([out[:2], out[1:-1]])  # each query attends as the one before it
    assert not passed(compare(answer, shifted, None, len(out), SPEC))


def test_what_is_left_unwritten_or_has_another_lse_does_not_pass() -> None:
    answer, out = answer_and_result(SPEC)
    unwritten = out.clone()
    unwritten[-1, -1, -1] = math.nan
    assert not passed(compare(answer, unwritten, None, len(out), SPEC))
    assert not passed(compare(answer, out, answer.lse + 0.05, len(out), SPEC))
    nan = torch.full_like(answer.lse, math.nan)
    assert not passed(compare(answer, out, nan, len(out), SPEC))


EVERYTHING = replace(CASE, sinks=True, kv_dtype=FP8, window=32, soft_cap=2.0)


@pytest.mark.parametrize("work", ["decode", "prefill", "extend"])
def test_a_backend_that_is_right_passes(work: Work) -> None:
    assert passed(check(RECORD, replace(EVERYTHING, work=work), "cpu"))


@pytest.mark.parametrize("forgotten", ["k_scale", "v_scale", "sinks", "window", "soft_cap"])
@pytest.mark.parametrize("work", ["decode", "prefill", "extend"])
def test_a_backend_that_forgets_a_feature_does_not_pass(
    work: Work, forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is that of a layer without the feature, which the backend at hand has."""
    true = reference

    def without(query: Any, cache: Any, batch: Any, layer: Any) -> Any:
        if forgotten in ("window", "soft_cap"):
            return true(query, cache, batch, replace(layer, spec=replace(layer.spec, **{forgotten: None})))
        return true(query, cache, batch, replace(layer, **{forgotten: None if forgotten == "sinks" else 1.0}))

    monkeypatch.setattr(trial, "reference", without)
    assert not passed(check(RECORD, replace(EVERYTHING, work=work), "cpu"))
