"""Preparation of a step and storage of its sampled tokens, one launch each; the twins are in `enginebay.kernels.batch`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from enginebay.kernels.batch import SlotState, StepBuffers

#: tokens, and columns of block tables, that a program handles of its row
_TOKENS = 512
#: rows that a program of `store_sampled` handles
_ROWS = 128


# Numbers of rows differ from step to step: specialised on 1 and multiples of 16, each kind would compile while serving.
@triton.jit(do_not_specialize=["rows", "num_decode_rows", "num_padding_rows"])
def _prepare_kernel(
    step: tl.tensor,
    token_ids: tl.tensor,
    num_computed: tl.tensor,
    block_tables: tl.tensor,
    floats: tl.tensor,
    integers: tl.tensor,
    slot_of_row: tl.tensor,
    num_scheduled: tl.tensor,
    seq_lens: tl.tensor,
    query_start_loc: tl.tensor,
    prefill_start_loc: tl.tensor,
    logits_indices: tl.tensor,
    row_floats: tl.tensor,
    row_integers: tl.tensor,
    positions: tl.tensor,
    input_ids: tl.tensor,
    row_block_tables: tl.tensor,
    slot_mappings: tl.tensor,
    rows: tl.tensor,
    num_decode_rows: tl.tensor,
    num_padding_rows: tl.tensor,
    num_slots: tl.tensor,
    max_model_len: tl.tensor,
    columns: tl.tensor,
    max_rows: tl.tensor,
    row_table_stride: tl.tensor,
    mapping_stride: tl.tensor,
    GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    slot = tl.load(step + row).to(tl.int64)
    count = tl.load(step + rows + row)
    computed = tl.load(num_computed + slot)
    seq_len = computed + count
    lane = tl.arange(0, CHUNK)

    # Decode rows have one token each; tokens of the other rows before this one are counted anew by every program.
    start = tl.minimum(row, num_decode_rows)
    for base in range(num_decode_rows, row, CHUNK):
        other = base + lane
        start += tl.sum(tl.load(step + rows + other, mask=other < row, other=0), 0)
    end = start + count

    if chunk == 0:
        tl.store(slot_of_row + row, slot)
        tl.store(num_scheduled + row, count)
        tl.store(seq_lens + row, seq_len)
        tl.store(query_start_loc + row + 1, end)
        tl.store(logits_indices + row, end - 1)
        if row >= num_decode_rows:
            tl.store(prefill_start_loc + row - num_decode_rows + 1, end - num_decode_rows)
        for i in tl.static_range(3):
            tl.store(row_floats + i * max_rows + row, tl.load(floats + i * num_slots + slot))
        for i in tl.static_range(2):
            tl.store(row_integers + i * max_rows + row, tl.load(integers + i * num_slots + slot))
        tl.store(row_integers + 2 * max_rows + row, tl.load(step + 3 * rows + row))

    index = chunk * CHUNK + lane
    mine = index < count
    position = computed + index
    tl.store(positions + start + index, position, mask=mine)
    token = tl.load(token_ids + slot * max_model_len + position, mask=mine)
    tl.store(input_ids + start + index, token, mask=mine)

    held = index < (seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE
    is_padding = row >= rows - num_padding_rows
    for group in tl.static_range(GROUPS):
        table = block_tables + (group * num_slots + slot) * columns
        row_table = row_block_tables + group * row_table_stride + row.to(tl.int64) * columns
        tl.store(row_table + index, tl.load(table + index, mask=held), mask=held)
        block = tl.load(table + position // BLOCK_SIZE, mask=mine).to(tl.int64)
        where = tl.where(is_padding, -1, block * BLOCK_SIZE + position % BLOCK_SIZE)
        tl.store(slot_mappings + group * mapping_stride + start + index, where, mask=mine)


@triton.jit(do_not_specialize=["num_sampled", "rows"])
def _store_sampled_kernel(
    token_ids: tl.tensor,
    slot_of_row: tl.tensor,
    seq_lens: tl.tensor,
    step: tl.tensor,
    sampled: tl.tensor,
    num_sampled: tl.tensor,
    rows: tl.tensor,
    max_model_len: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_sampled
    samples = tl.load(step + 2 * rows + row, mask=inside, other=0) != 0
    slot = tl.load(slot_of_row + row, mask=samples, other=0)
    last = tl.minimum(tl.load(seq_lens + row, mask=samples, other=0), max_model_len - 1)
    token = tl.load(sampled + row, mask=samples, other=0)
    tl.store(token_ids + slot * max_model_len + last, token.to(tl.int32), mask=samples)


def prepare(
    state: SlotState,
    buffers: StepBuffers,
    step: Tensor,
    *,
    num_decode_rows: int,
    num_padding_rows: int,
    max_query_len: int,
    max_seq_len: int,
    block_size: int,
) -> None:
    """See `enginebay.kernels.batch.prepare`."""
    rows = step.shape[1]
    groups, num_slots, columns = state.block_tables.shape
    longest = max(max_query_len, -(-max_seq_len // block_size))
    _prepare_kernel[(rows, triton.cdiv(longest, _TOKENS))](
        step,
        state.token_ids,
        state.num_computed,
        state.block_tables,
        state.floats,
        state.integers,
        buffers.slot_of_row,
        buffers.num_scheduled,
        buffers.seq_lens,
        buffers.query_start_loc,
        buffers.prefill_start_loc,
        buffers.logits_indices,
        buffers.floats,
        buffers.integers,
        buffers.positions,
        buffers.input_ids,
        buffers.block_tables,
        buffers.slot_mappings,
        rows,
        num_decode_rows,
        num_padding_rows,
        num_slots,
        state.token_ids.shape[1],
        columns,
        buffers.floats.stride(0),
        buffers.block_tables.stride(0),
        buffers.slot_mappings.stride(0),
        GROUPS=groups,
        BLOCK_SIZE=block_size,
        CHUNK=_TOKENS,
    )


def store_sampled(token_ids: Tensor, buffers: StepBuffers, step: Tensor, sampled: Tensor) -> None:
    """See `enginebay.kernels.batch.store_sampled`."""
    rows = len(sampled)
    _store_sampled_kernel[(triton.cdiv(rows, _ROWS),)](
        token_ids,
        buffers.slot_of_row,
        buffers.seq_lens,
        step,
        sampled.contiguous(),
        rows,
        step.shape[1],
        token_ids.shape[1],
        BLOCK=_ROWS,
    )
