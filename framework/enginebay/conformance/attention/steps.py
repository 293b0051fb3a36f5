"""Steps for attention backends: batches, paged caches in random order, and the float32 answer.

A step is built as the worker builds one: queries are a slice of fused QKV, table entries past a row's blocks are ids that
must never be followed, padding rows have one token in the null block, and the outputs are poisoned.

Shapes: ``T`` tokens, ``R`` rows, ``H`` query heads, ``K`` KV heads, ``D`` head size, ``S`` tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from enginebay.errors import PluginError
from enginebay.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer
from enginebay.interfaces.batch import GroupBatch, PhaseBatch
from enginebay.plugins.records import CANONICAL_AXES, AttentionRecord, KVLayout, Phase
from enginebay.plugins.requirements import AttentionSpec

#: a block id that no cache has: a kernel that follows it faults
NO_BLOCK = 2**30


@dataclass(frozen=True)
class Row:
    """A row's tokens in the step, and all its tokens, these included."""

    query_len: int
    seq_len: int


PADDING = Row(1, 1)


def make_cache(
    spec: AttentionSpec,
    layout: KVLayout,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """``[blocks, 2, block, K, D]`` of standard normal true values, in the layout's memory order."""
    sizes = {"blocks": num_blocks, "kv": 2, "block": block_size, "kv_heads": spec.num_kv_heads}
    sizes["head_dim"] = spec.head_dim
    # fp8 has no random numbers of its own
    made = dtype if dtype.itemsize > 1 else torch.float32
    memory = torch.empty([sizes[axis] for axis in layout.axes], dtype=made, device=generator.device)
    memory.normal_(generator=generator)
    cache = memory.permute([layout.axes.index(axis) for axis in CANONICAL_AXES])
    for half, scale in enumerate(scales):
        if scale != 1.0:
            cache[:, half].div_(scale)
    return cache if made == dtype else memory.to(dtype).permute([layout.axes.index(axis) for axis in CANONICAL_AXES])


def make_batch(
    rows: Sequence[Row],
    *,
    block_size: int,
    max_model_len: int,
    device: torch.device,
    seed: int = 0,
    padding: int = 0,
    sequential: bool = False,
) -> tuple[PhaseBatch, int]:
    """A batch of `rows` and `padding` padding rows, and how many blocks its cache needs.

    Blocks are in random order, or, where `sequential`, one after the other as a contiguous cache has them.
    """
    everything = [*rows, *[PADDING] * padding]
    counts = np.array([-(-row.seq_len // block_size) for row in rows])
    total = int(counts.sum())
    ids = np.arange(1, total + 1, dtype=np.int32)
    if not sequential:
        np.random.default_rng(seed).shuffle(ids)
    table = np.full((len(everything), -(-max_model_len // block_size)), NO_BLOCK, dtype=np.int32)
    for row, (count, end) in enumerate(zip(counts, counts.cumsum(), strict=True)):
        table[row, :count] = ids[end - count : end]
    table[len(rows) :] = 0
    starts = np.cumsum([0, *(row.query_len for row in everything)]).astype(np.int32)
    lens = np.array([row.seq_len for row in everything], dtype=np.int32)
    positions = np.concatenate([np.arange(row.seq_len - row.query_len, row.seq_len) for row in everything])
    slots = [
        table[r, at // block_size].astype(np.int64) * block_size + at % block_size if r < len(rows) else at * 0 - 1
        for r, row in enumerate(everything)
        for at in [np.arange(row.seq_len - row.query_len, row.seq_len)]
    ]
    batch = PhaseBatch(
        num_rows=len(everything),
        num_tokens=int(starts[-1]),
        max_query_len=max(row.query_len for row in everything),
        max_seq_len=int(lens.max()),
        query_start_loc=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(lens).to(device),
        positions=torch.from_numpy(positions).to(device),
        groups=(GroupBatch(torch.from_numpy(table).to(device), torch.from_numpy(np.concatenate(slots)).to(device)),),
        query_start_loc_host=starts,
        seq_lens_host=lens,
    )
    return batch, total + 1


def overwrite(batch: PhaseBatch, other: PhaseBatch) -> None:
    """Put another step of the same shape into the batch's buffers, as the core does between replays of a graph."""
    batch.query_start_loc.copy_(other.query_start_loc)
    batch.seq_lens.copy_(other.seq_lens)
    batch.positions.copy_(other.positions)
    batch.groups[0].block_table.copy_(other.groups[0].block_table)
    batch.groups[0].slot_mapping.copy_(other.groups[0].slot_mapping)
    batch.query_start_loc_host, batch.seq_lens_host = other.query_start_loc_host, other.seq_lens_host
    batch.max_seq_len = other.max_seq_len


def make_query(spec: AttentionSpec, tokens: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """``[T, H, D]``, a slice of fused QKV."""
    shape = (tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
    fused = torch.empty(shape, dtype=dtype, device=generator.device).normal_(generator=generator)
    return fused[:, : spec.num_heads]


def make_layer(
    spec: AttentionSpec, generator: torch.Generator, scales: tuple[float, float] = (1.0, 1.0)
) -> AttentionLayer:
    """A layer, with random sinks where the spec has them."""
    sinks = torch.randn(spec.num_heads, generator=generator, device=generator.device) if spec.sinks else None
    return AttentionLayer(0, spec, *scales, sinks=sinks)


def make_backend(
    record: AttentionRecord,
    phase: Phase,
    batch: PhaseBatch,
    layer: AttentionLayer,
    cache: Tensor,
    dtype: torch.dtype,
    layout: KVLayout,
    max_model_len: int,
    *,
    group: int = 0,
) -> AttentionBackend:
    """The backend by its record's factory, for steps up to `batch`; `group` is the cache group that it serves."""
    backend = record.factory(
        AttentionContext(
            spec=layer.spec,
            group=group,
            phase=phase,
            dtype=dtype,
            kv_dtype=cache.dtype,
            device=cache.device,
            block_size=cache.shape[2],
            layout=layout,
            max_num_rows=batch.num_rows,
            max_num_tokens=batch.num_tokens,
            max_model_len=max_model_len,
            options=record.options(),
        )
    )
    if not isinstance(backend, AttentionBackend):
        raise PluginError(f"the factory of attention backend {record.name!r} returned {backend!r}, no AttentionBackend")
    return backend


@dataclass(frozen=True, slots=True)
class Answer:
    """What the step should give, float32, and how far a kernel in the step's dtype may be from it."""

    #: ``[T, H, D]``
    out: Tensor
    #: ``[T, H]``
    lse: Tensor
    #: ``[T]``: largest error in any head and feature of the same sums with weights and result rounded to the query's dtype
    noise: Tensor


def reference(query: Tensor, cache: Tensor, batch: PhaseBatch, layer: AttentionLayer) -> Answer:
    """By the definition, over the cache's true values."""
    outs, lses, noises = [], [], []
    block_size = cache.shape[2]
    table = batch.groups[0].block_table.cpu()
    for row in range(batch.num_rows):
        start, end = batch.query_start_loc_host[row : row + 2].tolist()
        length = int(batch.seq_lens_host[row])
        blocks = table[row, : -(-length // block_size)].long().to(cache.device)
        key, value = cache[blocks].float().transpose(0, 1).flatten(1, 2)[:, :length]
        key, value = key * layer.k_scale, value * layer.v_scale
        out, lse, weights = attention(query[start:end].float(), key, value, layer)
        if cache.dtype.itemsize > query.dtype.itemsize:  # a kernel multiplies in the query's dtype
            key, value = key.to(query.dtype).float(), value.to(query.dtype).float()
            weights = attention(query[start:end].float(), key, value, layer)[2]
        rounded = _weighted(weights.to(query.dtype).float(), value) / weights.sum(-1).T.unsqueeze(-1)
        outs.append(out)
        lses.append(lse)
        noises.append((rounded.to(query.dtype).float() - out).abs().amax((1, 2)))
    return Answer(torch.cat(outs), torch.cat(lses), torch.cat(noises))


def attention(query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> tuple[Tensor, Tensor, Tensor]:
    """One row, causal to its end: ``query [Q, H, D]``, ``key`` and ``value [S, K, D]``, all float32.

    Returns out ``[Q, H, D]``, lse ``[Q, H]``, and the weights ``[H, Q, S or S + 1]``, unnormalised, greatest 1; a sink's
    comes last.
    """
    spec = layer.spec
    key = key.repeat_interleave(spec.num_heads // spec.num_kv_heads, 1)
    scores = torch.einsum("qhd,shd->hqs", query, key) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    queries, keys = query.shape[0], key.shape[0]
    at = torch.arange(keys, device=query.device)
    distance = at[keys - queries :, None] - at
    hidden = distance < 0
    if spec.window is not None:
        hidden |= distance >= spec.window
    scores = scores.masked_fill(hidden, -math.inf)
    if layer.sinks is not None:
        scores = torch.cat([scores, layer.sinks[:, None, None].expand(-1, queries, 1)], -1)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    out = _weighted(weights, value) / weights.sum(-1).T.unsqueeze(-1)
    return out, scores.logsumexp(-1).T, weights


def _weighted(weights: Tensor, value: Tensor) -> Tensor:
    """``[H, Q, S (+ 1)]`` and ``[S, K, D]`` to ``[Q, H, D]``."""
    value = value.repeat_interleave(weights.shape[0] // value.shape[1], 1)
    return torch.einsum("hqs,shd->qhd", weights[..., : value.shape[0]], value)
