"""Attention backends against the float32 answer: one case, and two backends that share one cache."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from attention_cases import record_of
from enginebay.conformance.attention import trial
from enginebay.conformance.attention.cases import Case
from enginebay.conformance.attention.steps import (
    Row,
    make_backend,
    make_batch,
    make_cache,
    make_layer,
    make_query,
    reference,
)
from enginebay.conformance.attention.trial import MAX_MODEL_LEN, compare, nan_first, poisoned
from enginebay.interfaces.attention import AttentionBackend
from enginebay.interfaces.batch import Bucket
from enginebay.kernels.kv_write import reshape_and_cache
from enginebay.plugins.negotiation import common_block_size
from enginebay.plugins.records import KVLayout, Phase
from enginebay.plugins.requirements import AttentionSpec, Hardware, Requirements


def check(case: Case, device: str) -> dict[str, Any]:
    """Run a case on ``"cuda"`` or ``"cpu"``; see `trial.check`."""
    return trial.check(record_of(case.backend), case, device)


# --- two backends, one cache -----------------------------------------------------------------------------------------


def pairs(backends: list[str], hardware: Hardware, dtype: str, head_dim: int) -> list[tuple[str, str, KVLayout, int]]:
    """Ordered pairs (prefill, decode) of different backends that can serve, with each layout and block that they share."""
    spec = pair_spec(head_dim)
    found = []
    for prefill, decode in itertools.permutations(backends, 2):
        records = [record_of(prefill), record_of(decode)]
        asked: dict[str, Any] = dict(hardware=hardware, dtype=dtype, kv_dtype=dtype, attention=(spec,))
        phases = ("prefill", "decode")
        if not all(r.supports(Requirements(phases=(p,), **asked)).ok for r, p in zip(records, phases, strict=True)):
            continue
        theirs = [layout.axes for layout in records[1].kv_layouts(spec)]
        common = [layout for layout in records[0].kv_layouts(spec) if layout.axes in theirs]
        found += [(prefill, decode, layout, common_block_size(records)) for layout in common]
    return found


def pair_spec(head_dim: int) -> AttentionSpec:
    return AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=head_dim, scale=head_dim**-0.5)


def check_pair(
    prefill: str, decode: str, layout: KVLayout, block_size: int, *, dtype: torch.dtype, head_dim: int, device: str
) -> dict[str, Any]:
    """Prompts through one backend and four more tokens a row through another, the core writing KV between them."""
    with torch.inference_mode():
        return _check_pair(prefill, decode, layout, block_size, dtype, head_dim, torch.device(device))


def _check_pair(
    prefill: str,
    decode: str,
    layout: KVLayout,
    block_size: int,
    dtype: torch.dtype,
    head_dim: int,
    device: torch.device,
) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(7)
    spec = pair_spec(head_dim)
    layer = make_layer(spec, generator)
    prompts = [1, block_size - 1, block_size, 3 * block_size + 5]
    added = 4
    sizes: dict[str, Any] = dict(block_size=block_size, max_model_len=MAX_MODEL_LEN, device=device)
    # every step's blocks are those of the longest, since the seed and the counts are its
    final, num_blocks = make_batch([Row(1, n + added) for n in prompts], **sizes)
    cache = make_cache(spec, layout, num_blocks, block_size, dtype, generator)
    table = final.groups[0].block_table
    backends: dict[Phase, AttentionBackend] = {}
    worst = {"error": 0.0, "of_tolerance": 0.0}
    for step in range(added + 1):
        name, rows = (
            (prefill, [Row(n, n) for n in prompts]) if step == 0 else (decode, [Row(1, n + step) for n in prompts])
        )
        batch, _ = make_batch(rows, **sizes)
        batch.groups[0].block_table.copy_(table)
        blocks = table.long().repeat_interleave(batch.query_start_loc.diff().long(), 0)
        at = batch.positions
        slots = blocks.gather(1, (at // block_size)[:, None])[:, 0] * block_size + at % block_size
        written = torch.randn(len(at), 2, spec.num_kv_heads, head_dim, generator=generator, device=device).to(dtype)
        reshape_and_cache(written, cache, slots)
        query = make_query(spec, batch.num_tokens, dtype, generator)
        phase: Phase = "prefill" if step == 0 else "decode"
        if phase not in backends:
            backends[phase] = make_backend(record_of(name), phase, batch, layer, cache, dtype, layout, MAX_MODEL_LEN)
        state = backends[phase].make_state(Bucket(batch.num_rows, batch.max_query_len))
        backends[phase].plan(batch, state)
        out, lse = poisoned(query, True)
        backends[phase].attend(layer, query, cache, batch, state, out, lse)
        found = compare(reference(query, cache, batch, layer), out, lse, len(query), spec)
        worst = {key: max(worst[key], found[key], key=nan_first) for key in worst}
    return worst
