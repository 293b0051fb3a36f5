"""A few steps of the slot-keyed batch on a device, beside the same steps on the CPU: what its kernels prepare must be equal."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from enginebay import SamplingParams
from enginebay.interfaces.batch import Batch, PhaseBatch
from enginebay.interfaces.scheduler import NewBlocks, NewRequest, SchedulerOutput
from enginebay.worker.batch import SlotBatch
from torch import Tensor

BLOCK_SIZE = 16
MAX_MODEL_LEN = 100  # no multiple of the block
PROMPTS = (5, 33, 17)
#: tokens a row by step, rows in order of slot: whole prompts but for a chunk, a decode row beside chunks, then decode alone
STEPS = ((5, 20, 17), (1, 13, 1), (1, 1, 1), (1, 1, 1))


def outputs() -> Iterator[tuple[SchedulerOutput, int | None]]:
    """Each step, and the rows that a step of decode rows alone is padded to."""
    computed = np.zeros(len(PROMPTS), dtype=np.int32)
    held = np.zeros(len(PROMPTS), dtype=np.int32)
    next_block = 1
    for step, counts in enumerate(STEPS):
        scheduled = np.array(counts, dtype=np.int32)
        decode = computed >= PROMPTS
        order = np.argsort(~decode, kind="stable").astype(np.int32)
        gained: list[tuple[int, int, int]] = []
        for slot in order:
            while held[slot] * BLOCK_SIZE < computed[slot] + scheduled[slot]:
                gained.append((int(slot), int(held[slot]), next_block))
                held[slot] += 1
                next_block += 1
        columns = np.array(gained, dtype=np.int32).reshape(-1, 3).T
        first = step == 0
        yield (
            SchedulerOutput(
                step=step,
                new_requests=[_request(slot, length) for slot, length in enumerate(PROMPTS)] if first else [],
                slots=order,
                num_scheduled_tokens=scheduled[order],
                num_computed_tokens=computed[order],
                num_decode_rows=int(decode.sum()),
                samples=(computed + scheduled >= PROMPTS)[order],
                output_index=np.maximum(0, computed + scheduled - PROMPTS)[order].astype(np.int32),
                new_blocks=(NewBlocks(*columns),),
            ),
            8 if decode.all() else None,
        )
        computed += scheduled


def _request(slot: int, length: int) -> NewRequest:
    return NewRequest(
        request_id=str(slot),
        slot=slot,
        token_ids=np.arange(1, length + 1, dtype=np.int32) * (slot + 1),
        num_prompt_tokens=length,
        num_computed_tokens=0,
        params=SamplingParams(temperature=0.0),
        seed=slot,
    )


def equal_on(device: torch.device) -> bool:
    """Whether every tensor of every step on `device` equals that on the CPU, sampled tokens of the step before included."""
    batches = [
        SlotBatch(
            max_num_seqs=9,
            max_num_tokens=64,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            num_groups=1,
            device=where,
        )
        for where in (device, torch.device("cpu"))
    ]
    for output, padded_rows in outputs():
        prepared = []
        for batch in batches:
            prepared.append([t.cpu().clone() for t in _tensors(batch.apply(output, padded_rows))])
            batch.advance(output)
            batch.store_sampled(output, torch.arange(output.num_rows, device=batch.device) + 100 * output.step)
        if not all(torch.equal(a, b) for a, b in zip(*prepared, strict=True)):
            return False
    return True


def _tensors(batch: Batch) -> Iterator[Tensor]:
    yield from (batch.slot_of_row, batch.input_ids, batch.positions, batch.logits_indices, *batch.slot_mappings)
    phases: list[PhaseBatch] = [phase for phase in (batch.decode, batch.prefill) if phase is not None]
    for phase in phases:
        yield from (phase.query_start_loc, phase.seq_lens, phase.positions)
        for group in phase.groups:
            yield from (_held_blocks(group.block_table, phase.seq_lens), group.slot_mapping)


def _held_blocks(block_table: Tensor, seq_lens: Tensor) -> Tensor:
    """The table with nought in what lies past a row's blocks, which is undefined."""
    columns = torch.arange(block_table.shape[1], device=block_table.device)
    return block_table.masked_fill(columns * BLOCK_SIZE >= seq_lens[:, None], 0)
