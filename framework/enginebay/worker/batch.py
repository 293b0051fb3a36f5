"""The persistent, slot-keyed batch: turns a step's differences into the tensors that every part reads.

Request state lives on the device, one line a slot; one further slot, the last, belongs to padding rows. A step brings the
slots of its rows and their token counts; positions, input ids, block tables and slot mappings are gathered on the device,
so a token sampled by the step before never visits the host first.

Shapes: ``S`` slots (padding included), ``L`` max_model_len, ``R`` rows, ``T`` tokens, ``B`` block-table columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from enginebay.interfaces.batch import NULL_SLOT, Batch, GroupBatch, PhaseBatch
from enginebay.interfaces.sampler import SamplerRows
from enginebay.interfaces.scheduler import NewBlocks, NewRequest, SchedulerOutput
from enginebay.kernels.transfer import to_device
from enginebay.sampling.sampler import SamplingRows


class SlotBatch:
    """Owns every buffer of the batch at its maximum size."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        device: torch.device,
    ) -> None:
        self.device = device
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.max_num_rows = max_num_seqs
        self.pad_slot = max_num_seqs
        slots = max_num_seqs + 1
        columns = -(-max_model_len // block_size)

        def buffer(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # state of slots
        self.token_ids = buffer(slots, max_model_len, dtype=torch.int32)
        self.num_computed = buffer(slots)
        self.num_prompt = buffer(slots)
        self.block_tables = tuple(buffer(slots, columns, dtype=torch.int32) for _ in range(num_groups))
        self.temperature = buffer(slots, dtype=torch.float32)
        self.top_p = torch.ones(slots, dtype=torch.float32, device=device)
        self.top_k = buffer(slots)
        self.min_p = buffer(slots, dtype=torch.float32)
        self.seed = buffer(slots)
        # what the host must know of it to choose a path without asking the device
        self._greedy_host = np.ones(slots, dtype=np.bool_)
        self._top_k_or_p_host = np.zeros(slots, dtype=np.bool_)
        self._min_p_host = np.zeros(slots, dtype=np.bool_)
        # the step
        rows, tokens = max_num_seqs, max(max_num_tokens, max_num_seqs)
        self.slot_of_row = buffer(rows)
        self.num_scheduled = buffer(rows)
        self.query_start_loc = buffer(rows + 1, dtype=torch.int32)
        self.prefill_start_loc = buffer(rows + 1, dtype=torch.int32)
        self.seq_lens = buffer(rows, dtype=torch.int32)
        self.logits_indices = buffer(rows)
        self.positions = buffer(tokens)
        self.input_ids = buffer(tokens)
        self.row_block_tables = tuple(buffer(rows, columns, dtype=torch.int32) for _ in range(num_groups))
        self.slot_mappings = tuple(buffer(tokens) for _ in range(num_groups))
        self._iota = torch.arange(max(rows + 1, tokens), device=device)

    # --- differences ---------------------------------------------------------------------------------------------------

    def apply(self, output: SchedulerOutput, padded_rows: int | None = None) -> Batch:
        """Take a step's differences and gather its tensors.

        `padded_rows` (only for steps of decode rows) appends padding rows up to a captured size.
        """
        if output.new_requests:
            self._add_requests(output.new_requests)
        for table, blocks in zip(self.block_tables, output.new_blocks, strict=True):
            self._add_blocks(table, blocks)
        if padded_rows is not None and padded_rows > output.num_rows:
            return self._gather(output, pad=padded_rows - output.num_rows)
        return self._gather(output, pad=0)

    def to_device(self, array: npt.NDArray[Any]) -> Tensor:
        """Copy a host array to the device without waiting for it."""
        return to_device(array, self.device)

    def _add_requests(self, requests: Sequence[NewRequest]) -> None:
        slots = np.array([r.slot for r in requests], dtype=np.int64)
        params = [r.params for r in requests]
        temperature = np.array([p.temperature for p in params], dtype=np.float32)
        top_p = np.array([p.top_p for p in params], dtype=np.float32)
        top_k = np.array([max(p.top_k, 0) for p in params], dtype=np.int64)
        min_p = np.array([p.min_p for p in params], dtype=np.float32)
        # A seed uses all 64 bits; as int64 its upper half is negative, which the generator does not mind.
        seed = np.array([r.seed for r in requests], dtype=np.uint64).view(np.int64)
        computed = np.array([r.num_computed_tokens for r in requests], dtype=np.int64)
        prompt = np.array([r.num_prompt_tokens for r in requests], dtype=np.int64)
        self._greedy_host[slots] = temperature == 0.0
        self._top_k_or_p_host[slots] = (top_k > 0) | (top_p < 1.0)
        self._min_p_host[slots] = min_p > 0.0
        index = self.to_device(slots)
        for state, values in (
            (self.temperature, temperature),
            (self.top_p, top_p),
            (self.top_k, top_k),
            (self.min_p, min_p),
            (self.seed, seed),
            (self.num_computed, computed),
            (self.num_prompt, prompt),
        ):
            state[index] = self.to_device(values)
        for request in requests:
            ids = self.to_device(np.ascontiguousarray(request.token_ids, dtype=np.int32))
            self.token_ids[request.slot, : len(ids)] = ids

    def _add_blocks(self, table: Tensor, blocks: NewBlocks) -> None:
        if len(blocks.slots):
            where = self.to_device(np.stack([blocks.slots, blocks.columns]).astype(np.int64))
            table[where[0], where[1]] = self.to_device(blocks.block_ids)

    # --- the step ------------------------------------------------------------------------------------------------------

    def _gather(self, output: SchedulerOutput, pad: int) -> Batch:
        rows = output.num_rows + pad
        counts_host = output.num_scheduled_tokens
        seq_lens_host = output.num_computed_tokens + counts_host
        slots_host = output.slots
        if pad:
            fill = np.full(pad, self.pad_slot, dtype=np.int32)
            one = np.ones(pad, dtype=np.int32)
            slots_host = np.concatenate([slots_host, fill])
            counts_host = np.concatenate([counts_host, one])
            seq_lens_host = np.concatenate([seq_lens_host, one])
        tokens = int(counts_host.sum())
        staged = self.to_device(np.stack([slots_host, counts_host]).astype(np.int64))
        slots = self.slot_of_row[:rows]
        counts = self.num_scheduled[:rows]
        slots.copy_(staged[0])
        counts.copy_(staged[1])

        computed = self.num_computed[slots]
        torch.add(computed, counts, out=self.seq_lens[:rows])
        start = self.query_start_loc[: rows + 1]
        torch.cumsum(counts, 0, dtype=torch.int32, out=start[1:])
        torch.sub(start[1:], 1, out=self.logits_indices[:rows])
        positions = self.positions[:tokens]
        num_decode = output.num_decode_rows + pad
        if tokens == rows:  # one token a row: token i is row i's
            row_of_token = self._iota[:rows]
            positions.copy_(computed)
        else:
            row_of_token = torch.repeat_interleave(self._iota[:rows], counts, output_size=tokens)
            torch.add((computed - start[:-1])[row_of_token], self._iota[:tokens], out=positions)
        slot_of_token = slots if tokens == rows else slots[row_of_token]
        self.input_ids[:tokens] = self.token_ids[slot_of_token, positions]
        self._gather_groups(slots, row_of_token, slot_of_token, positions, padded=pad > 0)

        start_host = np.zeros(rows + 1, dtype=np.int32)
        np.cumsum(counts_host, out=start_host[1:])
        return Batch(
            num_rows=rows,
            num_tokens=tokens,
            slot_of_row=slots,
            input_ids=self.input_ids[:tokens],
            positions=positions,
            logits_indices=self.logits_indices[:rows],
            slot_mappings=tuple(m[:tokens] for m in self.slot_mappings),
            decode=self._phase(0, num_decode, 0, num_decode, start, start_host, seq_lens_host),
            prefill=self._phase(num_decode, rows, num_decode, tokens, start, start_host, seq_lens_host),
        )

    def _gather_groups(
        self, slots: Tensor, row_of_token: Tensor, slot_of_token: Tensor, positions: Tensor, *, padded: bool
    ) -> None:
        rows, tokens = len(slots), len(positions)
        column = positions // self.block_size
        offset = positions % self.block_size
        for table, row_table, mapping in zip(self.block_tables, self.row_block_tables, self.slot_mappings, strict=True):
            torch.index_select(table, 0, slots, out=row_table[:rows])
            block = row_table[row_of_token, column]
            torch.add(block * self.block_size, offset, out=mapping[:tokens])
            if padded:
                mapping[:tokens].masked_fill_(slot_of_token == self.pad_slot, NULL_SLOT)

    def _phase(
        self,
        row0: int,
        row1: int,
        token0: int,
        token1: int,
        start: Tensor,
        start_host: npt.NDArray[np.int32],
        seq_lens_host: npt.NDArray[np.int32],
    ) -> PhaseBatch | None:
        if row0 == row1:
            return None
        if row0 == 0:
            phase_start = start[: row1 + 1]
        else:
            phase_start = self.prefill_start_loc[: row1 - row0 + 1]
            torch.sub(start[row0 : row1 + 1], token0, out=phase_start)
        phase_start_host = start_host[row0 : row1 + 1] - np.int32(token0)
        lens_host = seq_lens_host[row0:row1]
        return PhaseBatch(
            num_rows=row1 - row0,
            num_tokens=token1 - token0,
            max_query_len=int(np.diff(phase_start_host).max()),
            max_seq_len=int(lens_host.max()),
            query_start_loc=phase_start,
            seq_lens=self.seq_lens[row0:row1],
            positions=self.positions[token0:token1],
            groups=tuple(
                GroupBatch(block_table=t[row0:row1], slot_mapping=m[token0:token1])
                for t, m in zip(self.row_block_tables, self.slot_mappings, strict=True)
            ),
            query_start_loc_host=phase_start_host,
            seq_lens_host=lens_host,
        )

    # --- after the model -----------------------------------------------------------------------------------------------

    def sampling_rows(self, output: SchedulerOutput) -> SamplingRows:
        """The sampling state of the step's rows (padding left out)."""
        slots = self.slot_of_row[: output.num_rows]
        host = output.slots
        all_greedy = bool(self._greedy_host[host].all())
        return SamplingRows(
            temperature=self.temperature[slots],
            top_p=self.top_p[slots],
            top_k=self.top_k[slots],
            min_p=self.min_p[slots],
            seed=self.seed[slots],
            output_index=self.to_device(output.output_index.astype(np.int64)),
            all_greedy=all_greedy,
            any_top_k_or_p=not all_greedy and bool(self._top_k_or_p_host[host].any()),
            any_min_p=not all_greedy and bool(self._min_p_host[host].any()),
        )

    def sampler_rows(self, output: SchedulerOutput) -> SamplerRows:
        """The step's rows as logits processors see them (padding left out)."""
        rows = output.num_rows
        slots = self.slot_of_row[:rows]
        return SamplerRows(
            slots_host=output.slots,
            slots=slots,
            output_index=self.to_device(output.output_index.astype(np.int64)),
            output_index_host=output.output_index,
            token_ids=self.token_ids,
            num_tokens=self.seq_lens[:rows].long(),
            num_prompt_tokens=self.num_prompt[slots],
            max_num_tokens=int((output.num_computed_tokens + output.num_scheduled_tokens).max()),
        )

    def advance(self, output: SchedulerOutput) -> None:
        """Count the step's tokens as computed. Call once the forward has been launched."""
        rows = output.num_rows
        self.num_computed.index_add_(0, self.slot_of_row[:rows], self.num_scheduled[:rows])

    def store_sampled(self, output: SchedulerOutput, token_ids: Tensor) -> None:
        """Append each sampling row's token (int64 ``[R]``) to its slot, where the next step finds it."""
        rows = output.num_rows
        slots = self.slot_of_row[:rows]
        where = self.seq_lens[:rows].long()
        if not output.samples.all():
            # Rows amid their prompt sample nothing: their line already holds the prompt's next token.
            sampled = self.to_device(output.samples)
            slots = torch.where(sampled, slots, self.pad_slot)
            where = torch.where(sampled, where, 0)
        # The last position has no next step to read it; clamping keeps a full row inside its line.
        self.token_ids[slots, where.clamp_(max=self.max_model_len - 1)] = token_ids.to(torch.int32)
