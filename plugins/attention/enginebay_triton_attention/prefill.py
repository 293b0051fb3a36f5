"""Prefill: several queries a row over its paged keys, for prompts, chunks behind a context, and short extensions.

A program computes one tile of a row's queries for one KV head: the query heads that share it are neighbouring rows of the
tile, so each key is loaded once for all of them (FlashAttention-2's tiling; Dao 2023). Keys that every query of the tile sees
are walked without a mask, the rest with one. A tile's row is found from the query starts on the device.

Shapes: ``T`` tokens, ``R`` rows, ``H`` query heads, ``K`` KV heads, ``D`` head size, ``B`` block-table columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from enginebay.interfaces.attention import AttentionLayer
from enginebay.interfaces.batch import PhaseBatch
from torch import Tensor

from enginebay_triton_attention.tiles import LN_2, LOG2_E, attend_tile, kernel_scale, strides, tile_blocks


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How the prefill kernel is shaped."""

    #: rows of a tile: queries times the heads that share a KV head
    block_queries: int
    #: keys a tile
    block_keys: int
    num_warps: int
    num_stages: int


def prefill_config(head_dim: int, query_rows: int) -> PrefillConfig:
    """What was fastest on an H200.

    Parameters
    ----------
    head_dim
        ``D``.
    query_rows
        Tile rows that the longest row's queries fill.
    """
    if query_rows <= 16:
        return PrefillConfig(block_queries=16, block_keys=64, num_warps=4, num_stages=2)
    if head_dim > 128:
        return PrefillConfig(block_queries=64, block_keys=32, num_warps=4, num_stages=2)
    if query_rows <= 64:
        return PrefillConfig(block_queries=64, block_keys=64, num_warps=4, num_stages=2)
    return PrefillConfig(block_queries=128, block_keys=64, num_warps=8, num_stages=3)


def prefill_attention(
    layer: AttentionLayer,
    query: Tensor,
    cache: Tensor,
    batch: PhaseBatch,
    block_table: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    rows_padded: int,
) -> None:
    """Launch the kernel.

    Parameters
    ----------
    query, out
        ``[T, H, D]``, last axis contiguous.
    cache
        ``[blocks, 2, block, K, D]``, any strides but a contiguous last axis.
    batch
        The phase's rows: query starts and lengths on the device, counts on the host.
    block_table
        int32 ``[R, B]``.
    lse
        Optional float32 ``[T, H]``.
    rows_padded
        A power of two that no step's rows exceed.
    """
    spec = layer.spec
    heads, kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    group = heads // kv_heads
    group_rows = triton.next_power_of_2(group)
    config = prefill_config(head_dim, batch.max_query_len * group_rows)
    block_queries = max(config.block_queries, group_rows)
    tokens_per_tile = block_queries // group_rows
    # Every row may end within a tile of its own.
    tiles = batch.num_tokens // tokens_per_tile + batch.num_rows
    keys, values = cache[:, 0], cache[:, 1]
    has_cap, has_sinks, page = spec.soft_cap is not None, layer.sinks is not None, cache.shape[2]
    # Arguments that a variant does not read still need a tensor.
    lse_or_dummy = out if lse is None else lse
    _prefill[(kv_heads, tiles)](
        query,
        keys,
        values,
        block_table,
        batch.query_start_loc,
        batch.seq_lens,
        out,
        lse_or_dummy,
        out if layer.sinks is None else layer.sinks,
        *strides(query, out, lse_or_dummy, block_table, cache),
        batch.num_rows,
        tiles,
        kernel_scale(layer),
        spec.soft_cap or 0.0,
        layer.v_scale,
        spec.window or 0,
        GROUP=group,
        GROUP_ROWS=group_rows,
        D=head_dim,
        D_PAD=triton.next_power_of_2(head_dim),
        PAGE=page,
        BLOCK_QUERIES=block_queries,
        BLOCK_KEYS=config.block_keys,
        ROWS=rows_padded,
        ONE_PAGE=page % config.block_keys == 0,
        HAS_WINDOW=spec.window is not None,
        HAS_CAP=has_cap,
        HAS_SINKS=has_sinks,
        HAS_LSE=lse is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _prefill(
    query,
    keys,
    values,
    block_table,
    query_start_loc,
    seq_lens,
    out,
    lse,
    sinks,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    lse_token_stride,
    lse_head_stride,
    table_stride,
    block_stride,
    token_stride,
    head_stride,
    num_rows,
    num_tiles,
    scale,
    cap,
    v_scale,
    window,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    TOKENS: tl.constexpr = BLOCK_QUERIES // GROUP_ROWS
    kv_head = tl.program_id(0)
    # A row's last tiles see most keys: they start first, so that none is left alone at the end.
    tile = num_tiles - 1 - tl.program_id(1)
    # Row r's tiles begin at starts[r] // TOKENS + r, which leaves room for the ends of the rows before it.
    rows = tl.arange(0, ROWS)
    starts = tl.load(query_start_loc + rows, mask=rows < num_rows, other=0)
    begun = (rows < num_rows) & (starts // TOKENS + rows <= tile)
    row = tl.sum(begun.to(tl.int32), 0) - 1
    row_start = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - row_start
    first_token = (tile - (row_start // TOKENS + row)) * TOKENS
    if first_token >= query_len:
        return
    seq_len = tl.load(seq_lens + row)
    context = seq_len - query_len

    feature = tl.arange(0, D_PAD)
    lane = tl.arange(0, BLOCK_QUERIES)
    token = first_token + lane // GROUP_ROWS
    member = lane % GROUP_ROWS
    head = kv_head * GROUP + member
    real = (token < query_len) & (member < GROUP)
    inside = real[:, None] & (feature < D)[None, :]
    at = (row_start + token).to(tl.int64)
    q = tl.load(
        query + (at * query_token_stride + head * query_head_stride)[:, None] + feature[None, :], mask=inside, other=0.0
    )
    # rows that only fill the tile see what the last query sees, so that their sums are numbers too
    positions = context + tl.minimum(token, query_len - 1)
    first_position = context + first_token
    # keys of the tile's last query, and those that all of its queries see
    end = tl.minimum(first_position + TOKENS, seq_len)
    common = (first_position + 1) // BLOCK_KEYS * BLOCK_KEYS
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // BLOCK_KEYS * BLOCK_KEYS
        common = begin

    table = block_table + row.to(tl.int64) * table_stride
    keys += kv_head * head_stride
    values += kv_head * head_stride
    acc = tl.zeros([BLOCK_QUERIES, D_PAD], tl.float32)
    top = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_QUERIES], tl.float32)
    blocks = tile_blocks(table, begin, end, PAGE, BLOCK_KEYS, ONE_PAGE)
    if not HAS_WINDOW:
        for first in range(0, common, BLOCK_KEYS):
            next_blocks = tile_blocks(table, first + BLOCK_KEYS, end, PAGE, BLOCK_KEYS, ONE_PAGE)
            acc, top, total = attend_tile(
                q, keys, values, blocks, first, seq_len, positions, acc, top, total, block_stride, token_stride,
                scale, cap, window, D, D_PAD, PAGE, BLOCK_KEYS, ONE_PAGE, HAS_WINDOW, HAS_CAP, False,
            )  # fmt: skip
            blocks = next_blocks
    for first in range(common, end, BLOCK_KEYS):
        next_blocks = tile_blocks(table, first + BLOCK_KEYS, end, PAGE, BLOCK_KEYS, ONE_PAGE)
        acc, top, total = attend_tile(
            q, keys, values, blocks, first, seq_len, positions, acc, top, total, block_stride, token_stride,
            scale, cap, window, D, D_PAD, PAGE, BLOCK_KEYS, ONE_PAGE, HAS_WINDOW, HAS_CAP, True,
        )  # fmt: skip
        blocks = next_blocks

    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=member < GROUP, other=0.0) * LOG2_E
        total += tl.exp2(sink - top)
    result = acc * (v_scale / total)[:, None]
    target = out + (at * out_token_stride + head * out_head_stride)[:, None] + feature[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=inside)
    if HAS_LSE:
        tl.store(lse + at * lse_token_stride + head * lse_head_stride, (top + tl.log2(total)) * LN_2, mask=real)
