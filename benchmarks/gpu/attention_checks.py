"""Attention backends against the float32 answer: one case, and two backends that share one cache."""

from __future__ import annotations

import itertools
import math
import random
import zlib
from typing import Any

import torch
from attention_cases import FP8, LAYOUTS, Case, Work, record_of
from attention_steps import (
    Answer,
    Row,
    make_backend,
    make_batch,
    make_cache,
    make_layer,
    make_query,
    overwrite,
    reference,
)
from enginebay.interfaces.attention import AttentionBackend, AttentionLayer
from enginebay.interfaces.batch import Bucket, PhaseBatch, torch_dtype
from enginebay.kernels.kv_write import reshape_and_cache
from enginebay.plugins.negotiation import common_block_size
from enginebay.plugins.records import KVLayout, Phase
from enginebay.plugins.requirements import AttentionSpec, Hardware, Requirements
from measuring import capture
from torch import Tensor

MAX_MODEL_LEN = 1024
#: rows of a captured step, of which `PADDING_ROWS` are padding
CAPTURED_ROWS = 8
PADDING_ROWS = 3
#: what fp8 keys and values are scaled by: true values are these times what the cache holds
FP8_SCALES = (0.37, 0.61)


def rows_for(work: Work, block_size: int, seed: int, longest: int) -> list[Row]:
    """Ragged rows: the edges of a block and of a tile, the longest, and two at random."""
    draw = random.Random(seed)
    if work == "decode":
        lens = [1, block_size, block_size + 1, longest, draw.randint(2, longest)]
        return [Row(1, n) for n in lens]
    if work == "prefill":
        lens = [1, 3, min(128, longest), min(257, longest), draw.randint(2, longest)]
        return [Row(n, n) for n in lens]
    fixed = [Row(1, longest), Row(1, 1), Row(5, 5), Row(min(64, longest // 2), min(300, longest))]
    length = draw.randint(longest // 2, longest)
    return [*fixed, Row(draw.randint(2, length - 1), length)]


def check(case: Case, device: str, longest: int | None = None) -> dict[str, Any]:
    """Run a case on ``"cuda"`` or ``"cpu"``, with rows of up to `longest` tokens: 700, on a CPU 70.

    Returns ``error``, the largest of the output against float32; ``of_tolerance``, the largest share of what `tolerance`
    allows, which above 1 is a failure; and ``lse_error``.
    """
    with torch.inference_mode():
        return _check(case, torch.device(device), longest or (700 if device == "cuda" else 70))


def _check(case: Case, device: torch.device, longest: int) -> dict[str, Any]:
    seed = zlib.crc32(str(case).encode())
    generator = torch.Generator(device).manual_seed(seed)
    dtype, kv_dtype = torch_dtype(case.dtype), torch_dtype(case.kv_dtype)
    scales = FP8_SCALES if case.kv_dtype == FP8 else (1.0, 1.0)
    layout, spec = LAYOUTS[case.layout], case.spec
    padding = PADDING_ROWS if case.captured else 0
    rows = rows_for(case.work, case.block_size, seed, longest)
    sizes: dict[str, Any] = dict(block_size=case.block_size, max_model_len=MAX_MODEL_LEN, device=device)
    batch, num_blocks = make_batch(rows, seed=seed, padding=padding, **sizes)
    cache = make_cache(spec, layout, num_blocks, case.block_size, kv_dtype, generator, scales)
    layer = make_layer(spec, generator, scales)
    query = make_query(spec, batch.num_tokens, dtype, generator)
    backend = make_backend(case.backend, case.phase, batch, layer, cache, dtype, layout, MAX_MODEL_LEN)
    out, lse = poisoned(query, case.lse)
    if case.captured:
        live, _ = make_batch([], padding=len(rows) + padding, **sizes)
        run_captured(backend, layer, query, cache, live, batch, out, lse)
    else:
        state = backend.make_state(Bucket(batch.num_rows, batch.max_query_len))
        backend.plan(batch, state)
        backend.attend(layer, query, cache, batch, state, out, lse)
    answer = reference(query, cache, batch, layer)
    tokens = len(query) - padding  # what a padding row gives has no meaning but must not be an error
    return compare(answer, out, lse, tokens, spec)


def poisoned(query: Tensor, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Outputs that hold NaN until they are written."""
    out = torch.full(query.shape, math.nan, dtype=query.dtype, device=query.device)
    lse = torch.full(query.shape[:2], math.nan, dtype=torch.float32, device=query.device) if with_lse else None
    return out, lse


def run_captured(
    backend: AttentionBackend,
    layer: AttentionLayer,
    query: Tensor,
    cache: Tensor,
    live: PhaseBatch,
    batch: PhaseBatch,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Capture on padding rows alone, as the worker does, then replay on `batch` put into the same buffers."""
    state = backend.make_state(Bucket(live.num_rows, 1, captured=True))
    backend.plan(live, state)
    graph = capture(lambda: backend.attend(layer, query, cache, live, state, out, lse))
    out.fill_(math.nan)
    if lse is not None:
        lse.fill_(math.nan)
    overwrite(live, batch)
    backend.plan(live, state)
    graph.replay()


def tolerance(answer: Answer, dtype: torch.dtype, spec: AttentionSpec) -> Tensor:
    """``[T]``: the error allowed in a token's output.

    Three times the error that rounding alone makes (`Answer.noise`), since kernels round in other places
    and to other maxima; and a floor where that error is zero by luck: an eighth of the dtype's unit for a value near 1, which
    for a soft cap covers the hardware's tanh (relative error 2^-11 of each score) too.
    """
    unit = torch.finfo(dtype).eps
    floor = max(unit / 8, 2.0**-10 if spec.soft_cap is None else 2.0**-8)
    return 3 * answer.noise + floor


def compare(answer: Answer, out: Tensor, lse: Tensor | None, tokens: int, spec: AttentionSpec) -> dict[str, Any]:
    """Errors over the first `tokens` tokens; NaN where anything was left unwritten."""
    error = (out.float() - answer.out).abs().amax((1, 2))[:tokens]
    share = error / tolerance(answer, out.dtype, spec)[:tokens]
    found = {"error": float(error.max()), "of_tolerance": float(share.max())}
    if lse is not None:
        # scores are float32 sums of exact products; a soft cap adds the hardware's tanh
        allowed = 2e-3 if spec.soft_cap is None else 1e-2
        found["lse_error"] = float((lse - answer.lse)[:tokens].abs().max())
        found["of_tolerance"] = max(found["of_tolerance"], found["lse_error"] / allowed, key=_nan_first)
    return found


def _nan_first(value: float) -> float:
    return math.inf if math.isnan(value) else value


def passed(values: dict[str, Any]) -> bool:
    """Whether `compare`'s figures are within what is allowed; NaN is not."""
    return bool(values["of_tolerance"] <= 1)


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
            backends[phase] = make_backend(name, phase, batch, layer, cache, dtype, layout, MAX_MODEL_LEN)
        state = backends[phase].make_state(Bucket(batch.num_rows, batch.max_query_len))
        backends[phase].plan(batch, state)
        out, lse = poisoned(query, True)
        backends[phase].attend(layer, query, cache, batch, state, out, lse)
        found = compare(reference(query, cache, batch, layer), out, lse, len(query), spec)
        worst = {key: max(worst[key], found[key], key=_nan_first) for key in worst}
    return worst
