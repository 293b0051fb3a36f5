"""A step's tensors out of the slots' state, and sampled tokens back into it: torch twins of the fused kernels.

Shapes: ``S`` slots, the last of which belongs to padding rows; ``L`` max_model_len; ``G`` cache groups; ``B`` block-table
columns; ``R`` rows and ``T`` tokens of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from enginebay.interfaces.batch import NULL_SLOT
from enginebay.kernels.triton import usable


@dataclass(frozen=True, slots=True)
class SlotState:
    """What the device holds of every request, a line a slot."""

    #: int32 ``[S, L]``
    token_ids: Tensor
    #: int64 ``[S]``: tokens whose KV is in the cache
    num_computed: Tensor
    #: int32 ``[G, S, B]``
    block_tables: Tensor
    #: float32 ``[3, S]``: temperature, top_p, min_p
    floats: Tensor
    #: int64 ``[2, S]``: top_k, seed
    integers: Tensor


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """A step's tensors, contiguous, each at least as long as the longest step."""

    #: int64 ``[R]``
    slot_of_row: Tensor
    #: int64 ``[R]``
    num_scheduled: Tensor
    #: int32 ``[R]``: tokens once this step's KV is written
    seq_lens: Tensor
    #: int32 ``[R + 1]``; its first entry is 0 and never written
    query_start_loc: Tensor
    #: int32 ``[R + 1]``: the same from the first row behind the decode rows on, less its tokens; first entry likewise
    prefill_start_loc: Tensor
    #: int64 ``[R]``: index of the row's last token
    logits_indices: Tensor
    #: float32 ``[3, R]``: as in the state
    floats: Tensor
    #: int64 ``[3, R]``: top_k, seed, output_index
    integers: Tensor
    #: int64 ``[T]``
    positions: Tensor
    #: int64 ``[T]``
    input_ids: Tensor
    #: int32 ``[G, R, B]``: written as far as a row's tokens reach; what lies past is undefined
    block_tables: Tensor
    #: int64 ``[G, T]``: block id x block_size + offset, -1 in padding rows
    slot_mappings: Tensor


def prepare(
    state: SlotState,
    buffers: StepBuffers,
    step: Tensor,
    *,
    num_tokens: int,
    num_decode_rows: int,
    num_padding_rows: int,
    max_query_len: int,
    max_seq_len: int,
    block_size: int,
) -> None:
    """Fill `buffers` for a step.

    Parameters
    ----------
    state
        Read only.
    buffers
        Written up to the step's rows and tokens.
    step
        int32 ``[4, R]``, contiguous: slot, scheduled tokens, whether the row samples (read by `store_sampled`), output_index.
    num_tokens
        ``T``: the sum of the scheduled tokens.
    num_decode_rows
        Leading rows of one token each, padding included.
    num_padding_rows
        Trailing rows that are in the last slot, of one token each; only in a step of decode rows.
    max_query_len, max_seq_len
        Upper bounds over the rows, of scheduled tokens and of `seq_lens`.
    block_size
        Tokens a block.
    """
    if usable(step):
        from enginebay.kernels.triton import batch as fused

        fused.prepare(
            state,
            buffers,
            step,
            num_decode_rows=num_decode_rows,
            num_padding_rows=num_padding_rows,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            block_size=block_size,
        )
        return
    rows = step.shape[1]
    staged_slots, staged_counts, _, output_index = step.unbind()
    slots, counts = buffers.slot_of_row[:rows], buffers.num_scheduled[:rows]
    slots.copy_(staged_slots)
    counts.copy_(staged_counts)
    buffers.floats[:, :rows].copy_(state.floats.index_select(1, slots))
    buffers.integers[:2, :rows].copy_(state.integers.index_select(1, slots))
    buffers.integers[2, :rows].copy_(output_index)

    computed = state.num_computed.index_select(0, slots)
    torch.add(computed, counts, out=buffers.seq_lens[:rows])
    start = buffers.query_start_loc[: rows + 1]
    torch.cumsum(counts, 0, dtype=torch.int32, out=start[1:])
    torch.sub(start[1:], 1, out=buffers.logits_indices[:rows])
    if num_decode_rows < rows:
        behind = start[num_decode_rows:]
        torch.sub(behind, num_decode_rows, out=buffers.prefill_start_loc[: len(behind)])

    positions = buffers.positions[:num_tokens]
    if num_tokens == rows:  # one token a row: token i is row i's
        positions.copy_(computed)
        slot_of_token = slots
    else:
        row_of_token = torch.repeat_interleave(counts, output_size=num_tokens)
        torch.add((computed - start[:-1])[row_of_token], torch.arange(num_tokens, device=step.device), out=positions)
        slot_of_token = slots[row_of_token]
    buffers.input_ids[:num_tokens] = state.token_ids[slot_of_token, positions]

    column, offset = positions // block_size, positions % block_size
    used = -(-max_seq_len // block_size)
    for table, row_table, mapping in zip(state.block_tables, buffers.block_tables, buffers.slot_mappings, strict=True):
        torch.index_select(table[:, :used], 0, slots, out=row_table[:rows, :used])
        torch.add(table[slot_of_token, column] * block_size, offset, out=mapping[:num_tokens])
    if num_padding_rows:
        buffers.slot_mappings[:, num_tokens - num_padding_rows : num_tokens] = NULL_SLOT


def store_sampled(
    token_ids: Tensor, buffers: StepBuffers, step: Tensor, sampled: Tensor, *, every_row_samples: bool
) -> None:
    """Write each sampling row's token behind the tokens of its slot, where the next step finds it.

    The last position has no next step to read it, so a full row's token goes there: it stays inside its line.

    Parameters
    ----------
    token_ids
        int32 ``[S, L]``, written in place.
    buffers
        As `prepare` left them.
    step
        What `prepare` was given.
    sampled
        int64 ``[n]``: the first n rows' tokens; not read where a row does not sample.
    every_row_samples
        What `step` says of all n rows.
    """
    if usable(token_ids):
        from enginebay.kernels.triton import batch as fused

        fused.store_sampled(token_ids, buffers, step, sampled)
        return
    rows = len(sampled)
    slots = buffers.slot_of_row[:rows]
    last = buffers.seq_lens[:rows].long().clamp_(max=token_ids.shape[1] - 1)
    if not every_row_samples:
        # Rows amid their prompt: their line already holds the prompt's next token.
        sampled = torch.where(step[2, :rows].bool(), sampled, token_ids[slots, last])
    token_ids[slots, last] = sampled.to(torch.int32)
