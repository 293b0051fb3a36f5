"""Decode: one query a row over its paged keys, each of the plan's items a program a KV head.

The query heads that share a KV head are the rows of one tile, so each key is read once. A row of one item is written
straight out; the items of others leave partial results, which a second kernel puts together.

Shapes: ``R`` rows, ``H`` query heads, ``K`` KV heads, ``D`` head size, ``I`` items at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from enginebay.interfaces.attention import AttentionLayer
from torch import Tensor

from enginebay_triton_attention.split_plan import SplitPlan
from enginebay_triton_attention.tiles import LN_2, LOG2_E, attend_tile, kernel_scale, strides, tile_blocks


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the decode kernel is shaped."""

    #: keys a tile
    block_keys: int
    num_warps: int
    num_stages: int
    #: programs wanted for each multiprocessor
    programs_per_sm: int
    #: least tokens of an item
    min_split: int


def decode_config(head_dim: int) -> DecodeConfig:
    """What was fastest on an H200; wider heads take fewer keys a tile for the same bytes in flight."""
    return DecodeConfig(
        block_keys=64 if head_dim <= 128 else 32, num_warps=2, num_stages=2, programs_per_sm=4, min_split=128
    )


@dataclass(frozen=True, slots=True)
class Partials:
    """Results of items whose rows have several, float32."""

    #: ``[I, H, D]``, normalised
    out: Tensor
    #: ``[I, H]``, base two
    lse: Tensor

    @classmethod
    def empty(cls, items: int, heads: int, head_dim: int, device: torch.device) -> Partials:
        """Room for `items` items."""
        out = torch.empty(items, heads, head_dim, dtype=torch.float32, device=device)
        return cls(out, torch.empty(items, heads, dtype=torch.float32, device=device))

    @property
    def nbytes(self) -> int:
        """Device memory in bytes."""
        return self.out.nbytes + self.lse.nbytes


def decode_attention(
    layer: AttentionLayer,
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    plan: SplitPlan,
    partials: Partials,
    out: Tensor,
    lse: Tensor | None,
    *,
    items: int,
    config: DecodeConfig,
) -> None:
    """Launch the kernel for a step's items, and the merging of rows that have several.

    Parameters
    ----------
    query, out
        ``[R, H, D]``, last axis contiguous.
    cache
        ``[blocks, 2, block, K, D]``, any strides but a contiguous last axis.
    block_table
        int32 ``[R, B]``.
    lse
        Optional float32 ``[R, H]``.
    items
        Programs to launch a KV head: the most items that so many rows can have.
    """
    spec = layer.spec
    heads, kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    group = heads // kv_heads
    keys, values = cache[:, 0], cache[:, 1]
    has_cap, has_sinks = spec.soft_cap is not None, layer.sinks is not None
    lse_or_dummy = partials.lse if lse is None else lse
    sinks_or_dummy = partials.lse if layer.sinks is None else layer.sinks
    _decode[(kv_heads, items)](
        query,
        keys,
        values,
        block_table,
        plan.row,
        plan.begin,
        plan.end,
        plan.num_items,
        plan.total,
        out,
        lse_or_dummy,
        partials.out,
        partials.lse,
        sinks_or_dummy,
        *strides(query, out, lse_or_dummy, block_table, cache),
        kernel_scale(layer),
        spec.soft_cap or 0.0,
        layer.v_scale,
        HEADS=heads,
        GROUP=group,
        GROUP_ROWS=max(16, triton.next_power_of_2(group)),
        D=head_dim,
        D_PAD=triton.next_power_of_2(head_dim),
        PAGE=cache.shape[2],
        BLOCK_KEYS=config.block_keys,
        HAS_CAP=has_cap,
        HAS_SINKS=has_sinks,
        HAS_LSE=lse is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    _merge[(query.shape[0], heads)](
        partials.out,
        partials.lse,
        plan.first_item,
        plan.num_items,
        out,
        lse_or_dummy,
        sinks_or_dummy,
        out.stride(0),
        out.stride(1),
        lse_or_dummy.stride(0),
        lse_or_dummy.stride(1),
        HEADS=heads,
        D=head_dim,
        D_PAD=triton.next_power_of_2(head_dim),
        BLOCK_ITEMS=16,
        HAS_SINKS=has_sinks,
        HAS_LSE=lse is not None,
        num_warps=4,
    )


@triton.jit
def _decode(
    query,
    keys,
    values,
    block_table,
    item_row,
    item_begin,
    item_end,
    num_items,
    total_items,
    out,
    lse,
    partial_out,
    partial_lse,
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
    scale,
    cap,
    v_scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    # All four are loaded at once; waiting for the first before the others would cost as much again.
    row = tl.load(item_row + item)
    begin = tl.load(item_begin + item)
    end = tl.load(item_end + item)
    if item >= tl.load(total_items):
        return
    feature = tl.arange(0, D_PAD)
    member = tl.arange(0, GROUP_ROWS)
    head = kv_head * GROUP + member
    inside = (member < GROUP)[:, None] & (feature < D)[None, :]
    q = tl.load(
        query + row.to(tl.int64) * query_token_stride + head[:, None] * query_head_stride + feature[None, :],
        mask=inside,
        other=0.0,
    )
    table = block_table + row.to(tl.int64) * table_stride
    keys += kv_head * head_stride
    values += kv_head * head_stride

    acc = tl.zeros([GROUP_ROWS, D_PAD], tl.float32)
    top = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    whole = begin + (end - begin) // BLOCK_KEYS * BLOCK_KEYS
    # the last of the row's keys is the one that its query sees last
    positions = tl.zeros([GROUP_ROWS], tl.int32) + end - 1
    blocks = tile_blocks(table, begin, end, PAGE, BLOCK_KEYS, False)
    for first in range(begin, whole, BLOCK_KEYS):
        next_blocks = tile_blocks(table, first + BLOCK_KEYS, end, PAGE, BLOCK_KEYS, False)
        acc, top, total = attend_tile(
            q, keys, values, blocks, first, end, positions, acc, top, total, block_stride, token_stride,
            scale, cap, 0, D, D_PAD, PAGE, BLOCK_KEYS, False, False, HAS_CAP, False,
        )  # fmt: skip
        blocks = next_blocks
    if whole < end:
        acc, top, total = attend_tile(
            q, keys, values, blocks, whole, end, positions, acc, top, total, block_stride, token_stride,
            scale, cap, 0, D, D_PAD, PAGE, BLOCK_KEYS, False, False, HAS_CAP, True,
        )  # fmt: skip

    if tl.load(num_items + row) == 1:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=member < GROUP, other=0.0) * LOG2_E
            total += tl.exp2(sink - top)
        result = acc * (v_scale / total)[:, None]
        target = out + row.to(tl.int64) * out_token_stride + head[:, None] * out_head_stride + feature[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=inside)
        if HAS_LSE:
            natural = (top + tl.log2(total)) * LN_2
            tl.store(lse + row * lse_token_stride + head * lse_head_stride, natural, mask=member < GROUP)
    else:
        result = acc * (v_scale / total)[:, None]
        part = item.to(tl.int64) * HEADS + head
        tl.store(partial_out + part[:, None] * D + feature[None, :], result, mask=inside)
        tl.store(partial_lse + part, top + tl.log2(total), mask=member < GROUP)


@triton.jit
def _merge(
    partial_out,
    partial_lse,
    first_item,
    num_items,
    out,
    lse,
    sinks,
    out_token_stride,
    out_head_stride,
    lse_token_stride,
    lse_head_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """One head of a row of several items: its parts' mean, weighted by their sums of exponentials."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(first_item + row)
    count = tl.load(num_items + row)
    if count == 1:
        return
    feature = tl.arange(0, D_PAD)
    acc = tl.zeros([D_PAD], tl.float32)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, count, BLOCK_ITEMS):
        item = start + tl.arange(0, BLOCK_ITEMS)
        part = (first + item).to(tl.int64) * HEADS + head
        part_lse = tl.load(partial_lse + part, mask=item < count, other=float("-inf"))
        part_out = tl.load(
            partial_out + part[:, None] * D + feature[None, :],
            mask=(item < count)[:, None] & (feature < D)[None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(part_lse, 0))
        weight = tl.exp2(part_lse - new_top)
        shrink = tl.exp2(top - new_top)
        acc = acc * shrink + tl.sum(part_out * weight[:, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        top = new_top
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks + head) * LOG2_E - top)
    target = out + row.to(tl.int64) * out_token_stride + head * out_head_stride + feature
    tl.store(target, (acc / total).to(out.dtype.element_ty), mask=feature < D)
    if HAS_LSE:
        tl.store(lse + row * lse_token_stride + head * lse_head_stride, (top + tl.log2(total)) * LN_2)
