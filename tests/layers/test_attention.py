"""The attention layer: phases into their slices, norms before rotation, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from enginebay.errors import ModelError
from enginebay.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer, PlanState
from enginebay.interfaces.batch import Batch, Bucket, GroupBatch, PhaseBatch
from enginebay.layers.attention import Attention, AttentionRuntime
from enginebay.layers.norm import RMSNorm
from enginebay.plugins.records import NHD, NoOptions, Phase
from enginebay.plugins.requirements import AttentionSpec
from torch import Tensor

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=1.0)
CPU = torch.device("cpu")


class Recorder(AttentionBackend):
    """Writes a constant and keeps what it was given."""

    def __init__(self, phase: Phase, value: float) -> None:
        context = AttentionContext(
            spec=SPEC,
            group=1,
            phase=phase,
            dtype=torch.float32,
            kv_dtype=torch.float32,
            device=CPU,
            block_size=4,
            layout=NHD,
            max_num_rows=8,
            max_num_tokens=64,
            max_model_len=64,
            options=NoOptions(),
        )
        super().__init__(context)
        self.value = value
        self.calls: list[tuple[AttentionLayer, Tensor, PhaseBatch, PlanState]] = []

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        cache: Tensor,
        batch: PhaseBatch,
        state: PlanState,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        self.calls.append((layer, query.clone(), batch, state))
        out.fill_(self.value)


def phase(tokens: int) -> PhaseBatch:
    host = np.array([0, tokens], np.int32)
    return PhaseBatch(
        num_rows=1,
        num_tokens=tokens,
        max_query_len=tokens,
        max_seq_len=tokens,
        query_start_loc=torch.from_numpy(host),
        seq_lens=torch.tensor([tokens], dtype=torch.int32),
        positions=torch.arange(tokens),
        groups=(GroupBatch(torch.zeros(1, 1, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int64)),) * 2,
        query_start_loc_host=host,
        seq_lens_host=np.array([tokens], np.int32),
    )


def bound(decode: int, prefill: int, **parts: Any) -> tuple[Attention, AttentionRuntime, Recorder, Recorder, Tensor]:
    tokens = decode + prefill
    recorders = Recorder("decode", 1.0), Recorder("prefill", 2.0)
    slots = torch.arange(tokens) + 4
    batch = Batch(
        num_rows=2,
        num_tokens=tokens,
        slot_of_row=torch.arange(2),
        input_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.arange(tokens),
        logits_indices=torch.arange(2),
        slot_mappings=(torch.full((tokens,), -1), slots),  # group 1 is the layer's
        decode=phase(decode) if decode else None,
        prefill=phase(prefill) if prefill else None,
    )
    states = PlanState(Bucket(1, 1)), PlanState(Bucket(1, 64))
    runtime = AttentionRuntime(1, *recorders, batch, *states)
    layer = Attention(3, SPEC, parts.get("q_norm"), parts.get("k_norm"), None)
    cache = torch.zeros(8, 2, 4, 2, 8)
    layer.bind(runtime, cache)
    return layer, runtime, *recorders, cache


@pytest.mark.parametrize(("decode", "prefill"), [(2, 3), (2, 0), (0, 3)])
def test_each_phase_fills_its_slice(decode: int, prefill: int) -> None:
    layer, runtime, first, second, cache = bound(decode, prefill)
    tokens = decode + prefill
    qkv = torch.randn(tokens, 64)
    want = qkv.clone().view(tokens, 8, 8)
    out = layer(qkv, torch.arange(tokens))
    assert out[:, 0].tolist() == [1.0] * decode + [2.0] * prefill
    assert out.shape == (tokens, 32)
    assert [len(first.calls), len(second.calls)] == [int(decode > 0), int(prefill > 0)]
    batch = runtime.batch
    assert batch is not None
    if decode:
        facts, query, seen, state = first.calls[0]
        assert (facts.index, facts.spec) == (3, SPEC)
        assert torch.equal(query, want[:decode, :4])
        assert seen is batch.decode
        assert state is runtime.decode_state
    if prefill:
        _, query, seen, state = second.calls[0]
        assert torch.equal(query, want[decode:, :4])
        assert seen is batch.prefill
        assert state is runtime.prefill_state
    written = cache.transpose(1, 2).reshape(32, 2, 2, 8)[4 : 4 + tokens]
    assert torch.equal(written[:, 0], want[:, 4:6])
    assert torch.equal(written[:, 1], want[:, 6:])


def norm(name: str, scale: float) -> RMSNorm:
    made = RMSNorm(name, 8, 1e-6, torch.float32, CPU)
    made.weight.data.fill_(scale)
    return made


def test_norms_apply_to_queries_and_keys_and_not_to_values() -> None:
    layer, _, _, recorder, cache = bound(0, 2, q_norm=norm("q", 2.0), k_norm=norm("k", 5.0))
    qkv = torch.randn(2, 64)
    states = qkv.clone().view(2, 8, 8)
    unit = states / states.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()
    layer(qkv, torch.arange(2))
    torch.testing.assert_close(recorder.calls[0][1], 2 * unit[:, :4])
    written = cache.transpose(1, 2).reshape(32, 2, 2, 8)[4:6]
    torch.testing.assert_close(written[:, 0], 5 * unit[:, 4:6])
    assert torch.equal(written[:, 1], states[:, 6:])


def test_a_layer_that_is_not_bound_says_so() -> None:
    with pytest.raises(ModelError, match="attention layer 3 ran before it was bound"):
        Attention(3, SPEC, None, None, None)(torch.zeros(1, 64), torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("shape", [(8, 2, 4, 4, 8), (8, 4, 2, 2, 8), (8, 2, 4, 2, 16), (8, 2, 4, 16)])
def test_a_cache_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    layer, runtime, *_ = bound(1, 0)
    with pytest.raises(ModelError, match=r"the cache must be \[blocks, 2, block, 2, 8\], not"):
        layer.bind(runtime, torch.zeros(shape))


def test_the_backend_is_told_scales_and_sinks() -> None:
    spec, sinks = replace(SPEC, sinks=True), torch.arange(4.0)
    layer = Attention(0, spec, None, None, None, sinks)
    layer.bind(
        AttentionRuntime(1, Recorder("decode", 1.0), Recorder("prefill", 2.0)), torch.zeros(8, 2, 4, 2, 8), k_scale=0.5
    )
    assert (layer.layer.k_scale, layer.layer.v_scale, layer.layer.sinks) == (0.5, 1.0, sinks)


@pytest.mark.parametrize(("declared", "sinks"), [(True, None), (False, torch.zeros(4))])
def test_sinks_and_what_the_spec_says_of_them_must_agree(declared: bool, sinks: Tensor | None) -> None:
    with pytest.raises(ModelError, match="sinks"):
        Attention(0, replace(SPEC, sinks=declared), None, None, None, sinks)
