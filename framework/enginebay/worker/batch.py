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

from enginebay.interfaces.batch import Batch, GroupBatch, PhaseBatch
from enginebay.interfaces.sampler import SamplerRows
from enginebay.interfaces.scheduler import Int32Array, NewBlocks, NewRequest, SchedulerOutput
from enginebay.kernels.batch import SlotState, StepBuffers, prepare, store_sampled
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

        self._entered = buffer(4, slots)  # top_k, seed, tokens of the prompt, tokens computed
        self.num_prompt, self.num_computed = self._entered[2:]
        self.state = SlotState(
            token_ids=buffer(slots, max_model_len, dtype=torch.int32),
            num_computed=self.num_computed,
            block_tables=buffer(num_groups, slots, columns, dtype=torch.int32),
            floats=buffer(3, slots, dtype=torch.float32),
            integers=self._entered[:2],
        )
        self.token_ids, self.block_tables = self.state.token_ids, self.state.block_tables
        # what the host must know of it to choose a path without asking the device
        self._greedy_host = np.ones(slots, dtype=np.bool_)
        self._top_k_or_p_host = np.zeros(slots, dtype=np.bool_)
        self._min_p_host = np.zeros(slots, dtype=np.bool_)
        # Multiples of 4: then each group's part of a tensor of several begins at 16 bytes, as kernels like it.
        rows, tokens = _up_to_4(max_num_seqs), _up_to_4(max(max_num_tokens, max_num_seqs))
        self._step = StepBuffers(
            slot_of_row=buffer(rows),
            num_scheduled=buffer(rows),
            seq_lens=buffer(rows, dtype=torch.int32),
            query_start_loc=buffer(rows + 1, dtype=torch.int32),
            prefill_start_loc=buffer(rows + 1, dtype=torch.int32),
            logits_indices=buffer(rows),
            floats=buffer(3, rows, dtype=torch.float32),
            integers=buffer(3, rows),
            positions=buffer(tokens),
            input_ids=buffer(tokens),
            block_tables=buffer(num_groups, rows, columns, dtype=torch.int32),
            slot_mappings=buffer(num_groups, tokens),
        )
        self.row_block_tables = tuple(self._step.block_tables)
        self._slot_mappings = tuple(self._step.slot_mappings)
        #: what the last `apply` brought to the device: see `kernels.batch.prepare`
        self._staged = torch.zeros((4, 0), dtype=torch.int32, device=device)

    # --- differences ---------------------------------------------------------------------------------------------------

    def apply(self, output: SchedulerOutput, padded_rows: int | None = None) -> Batch:
        """Take a step's differences and gather its tensors.

        `padded_rows` (only for steps of decode rows) appends padding rows up to a captured size.
        """
        if output.new_requests:
            self._add_requests(output.new_requests)
        self._add_blocks(output.new_blocks)
        return self._gather(output, max(output.num_rows, padded_rows or 0))

    def to_device(self, array: npt.NDArray[Any]) -> Tensor:
        """Copy a host array to the device without waiting for it."""
        return to_device(array, self.device)

    def _add_requests(self, requests: Sequence[NewRequest]) -> None:
        slots = np.array([r.slot for r in requests], dtype=np.int64)
        params = [r.params for r in requests]
        temperature = np.array([p.temperature for p in params], dtype=np.float32)
        top_p = np.array([p.top_p for p in params], dtype=np.float32)
        min_p = np.array([p.min_p for p in params], dtype=np.float32)
        top_k = np.array([max(p.top_k, 0) for p in params], dtype=np.int64)
        # A seed uses all 64 bits; as int64 its upper half is negative, which the generator does not mind.
        seed = np.array([r.seed for r in requests], dtype=np.uint64).view(np.int64)
        prompt = np.array([r.num_prompt_tokens for r in requests], dtype=np.int64)
        computed = np.array([r.num_computed_tokens for r in requests], dtype=np.int64)
        self._greedy_host[slots] = temperature == 0.0
        self._top_k_or_p_host[slots] = (top_k > 0) | (top_p < 1.0)
        self._min_p_host[slots] = min_p > 0.0
        index = self.to_device(slots)
        self.state.floats[:, index] = self.to_device(np.stack([temperature, top_p, min_p]))
        self._entered[:, index] = self.to_device(np.stack([top_k, seed, prompt, computed]))
        for request in requests:
            ids = self.to_device(np.ascontiguousarray(request.token_ids, dtype=np.int32))
            self.token_ids[request.slot, : len(ids)] = ids

    def _add_blocks(self, new_blocks: Sequence[NewBlocks]) -> None:
        """Enter the new blocks of all groups: one copy to the device and one scatter."""
        _, slots, columns = self.block_tables.shape
        count = sum(len(blocks.slots) for blocks in new_blocks)
        if not count:
            return
        staged = np.empty(3 * count, dtype=np.int32)
        where, ids = staged[: 2 * count].view(np.int64), staged[2 * count :]
        end = 0
        for group, blocks in enumerate(new_blocks):
            begin, end = end, end + len(blocks.slots)
            where[begin:end] = (blocks.slots.astype(np.int64) + group * slots) * columns + blocks.columns
            ids[begin:end] = blocks.block_ids
        entries = self.to_device(staged)
        self.block_tables.view(-1).scatter_(0, entries[: 2 * count].view(torch.int64), entries[2 * count :])

    # --- the step ------------------------------------------------------------------------------------------------------

    def _gather(self, output: SchedulerOutput, rows: int) -> Batch:
        step, real = self._step, output.num_rows
        staged = np.empty((4, rows), dtype=np.int32)
        staged[0, :real], staged[0, real:] = output.slots, self.pad_slot
        staged[1, :real], staged[1, real:] = output.num_scheduled_tokens, 1
        staged[2, :real], staged[2, real:] = output.samples, 0
        staged[3, :real], staged[3, real:] = output.output_index, 0
        counts = staged[1]
        seq_lens = counts.copy()
        seq_lens[:real] += output.num_computed_tokens
        start = np.zeros(rows + 1, dtype=np.int32)
        np.cumsum(counts, out=start[1:])
        tokens, num_decode = int(start[-1]), output.num_decode_rows + rows - real
        decode = self._phase(slice(0, num_decode), step.query_start_loc, start, counts, seq_lens)
        prefill = self._phase(slice(num_decode, rows), step.prefill_start_loc, start, counts, seq_lens)
        phases = [phase for phase in (decode, prefill) if phase is not None]
        self._staged = self.to_device(staged)
        prepare(
            self.state,
            step,
            self._staged,
            num_tokens=tokens,
            num_decode_rows=num_decode,
            num_padding_rows=rows - real,
            max_query_len=max(phase.max_query_len for phase in phases),
            max_seq_len=max(phase.max_seq_len for phase in phases),
            block_size=self.block_size,
        )
        return Batch(
            num_rows=rows,
            num_tokens=tokens,
            slot_of_row=step.slot_of_row[:rows],
            input_ids=step.input_ids[:tokens],
            positions=step.positions[:tokens],
            logits_indices=step.logits_indices[:rows],
            slot_mappings=tuple(m[:tokens] for m in self._slot_mappings),
            decode=decode,
            prefill=prefill,
        )

    def _phase(
        self, rows: slice, start: Tensor, start_host: Int32Array, counts_host: Int32Array, seq_lens_host: Int32Array
    ) -> PhaseBatch | None:
        """View `rows` of the step; `start` counts from their first token on."""
        num_rows = rows.stop - rows.start
        if not num_rows:
            return None
        starts, lens = start_host[rows.start : rows.stop + 1], seq_lens_host[rows]
        tokens = slice(int(starts[0]), int(starts[-1]))
        return PhaseBatch(
            num_rows=num_rows,
            num_tokens=tokens.stop - tokens.start,
            max_query_len=int(counts_host[rows].max()),
            max_seq_len=int(lens.max()),
            query_start_loc=start[: num_rows + 1],
            seq_lens=self._step.seq_lens[rows],
            positions=self._step.positions[tokens],
            groups=tuple(
                GroupBatch(block_table=t[rows], slot_mapping=m[tokens])
                for t, m in zip(self.row_block_tables, self._slot_mappings, strict=True)
            ),
            query_start_loc_host=starts - starts[0],
            seq_lens_host=lens,
        )

    # --- after the model -----------------------------------------------------------------------------------------------

    def sampling_rows(self, output: SchedulerOutput) -> SamplingRows:
        """The sampling state of the step's rows (padding left out); valid until the next `apply`."""
        host = output.slots
        all_greedy = bool(self._greedy_host[host].all())
        temperature, top_p, min_p = self._step.floats[:, : output.num_rows]
        top_k, seed, output_index = self._step.integers[:, : output.num_rows]
        return SamplingRows(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            output_index=output_index,
            all_greedy=all_greedy,
            any_top_k_or_p=not all_greedy and bool(self._top_k_or_p_host[host].any()),
            any_min_p=not all_greedy and bool(self._min_p_host[host].any()),
        )

    def sampler_rows(self, output: SchedulerOutput) -> SamplerRows:
        """The step's rows as logits processors see them (padding left out); valid until the next `apply`."""
        rows = output.num_rows
        slots = self._step.slot_of_row[:rows]
        return SamplerRows(
            slots_host=output.slots,
            slots=slots,
            output_index=self._step.integers[2, :rows],
            output_index_host=output.output_index,
            token_ids=self.token_ids,
            num_tokens=self._step.seq_lens[:rows].long(),
            num_prompt_tokens=self.num_prompt[slots],
            max_num_tokens=int((output.num_computed_tokens + output.num_scheduled_tokens).max()),
        )

    def advance(self, output: SchedulerOutput) -> None:
        """Count the step's tokens as computed. Call once the forward has been launched."""
        rows = output.num_rows
        self.num_computed.index_add_(0, self._step.slot_of_row[:rows], self._step.num_scheduled[:rows])

    def store_sampled(self, output: SchedulerOutput, token_ids: Tensor) -> None:
        """Append each sampling row's token (int64 ``[R]``) to its slot, where the next step finds it."""
        every = bool(output.samples.all())
        store_sampled(self.token_ids, self._step, self._staged, token_ids, every_row_samples=every)


def _up_to_4(number: int) -> int:
    return -(-number // 4) * 4
