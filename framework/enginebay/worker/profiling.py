"""A rehearsal of the largest steps and of graph captures, to learn how much device memory serving takes at its peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from enginebay.interfaces.scheduler import NewBlocks, NewRequest, SchedulerOutput
from enginebay.sampling.params import SamplingParams
from enginebay.worker.batch import SlotBatch
from enginebay.worker.cuda_graphs import DecodeGraph
from enginebay.worker.memory import ALLOCATION_UNIT, DeviceMemory
from enginebay.worker.model_runner import ModelRunner
from enginebay.worker.prompt_scorer import PROMPT_CHUNK

#: What takes most memory to sample: filters, processors that copy the logits, log-probabilities of the whole vocabulary.
_COSTLIEST = SamplingParams(
    top_p=0.9,
    min_p=0.01,
    allowed_token_ids=(0, 1),
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    logprobs=-1,
)


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal found, in bytes."""

    #: most that torch's allocator held while steps ran eagerly, weights included
    peak: int
    #: what it keeps for the graphs of all sizes
    graphs: int
    #: what was held outside torch in the end, graphs there
    outside: int


def rehearse(runner: ModelRunner, max_num_tokens: int, graph_sizes: Sequence[int], device: torch.device) -> Rehearsal:
    """Run the largest steps and capture graphs; every row reads and writes the null block, whose content has no meaning."""
    peak = peak_of_steps(runner, max_num_tokens, device)
    graphs, after = memory_of_graphs(runner, graph_sizes, device)
    return Rehearsal(peak, graphs, after.outside)


def peak_of_steps(runner: ModelRunner, max_num_tokens: int, device: torch.device) -> int:
    """Run the decode step of most rows, then the prefill step of most tokens, and return the allocator's peak in bytes.

    The first step's result lives while the second runs, as with two steps in flight. What counts is what the allocator took
    from the driver: the tensors alone would leave out what it loses to rounding and to gaps.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    runner.execute(largest_decode_step(runner.batch, max_num_tokens))
    in_flight = runner.sample()
    runner.execute(largest_step(runner.batch, max_num_tokens))
    runner.sample()
    torch.cuda.synchronize(device)
    del in_flight
    return torch.cuda.max_memory_reserved(device)


def memory_of_graphs(runner: ModelRunner, sizes: Sequence[int], device: torch.device) -> tuple[int, DeviceMemory]:
    """What graphs of all `sizes` will keep of torch's memory in bytes, and the device's memory while they do.

    The two largest are captured as they will be at the start, then dropped. The first brings the pool that all share and
    what libraries load; each further one is taken to keep as much as the second, which is the largest of them.
    """
    ordered = sorted(set(sizes), reverse=True)
    marks, pool = [DeviceMemory.settled(device)], None
    graphs: list[DecodeGraph] = []
    for size in ordered[:2]:
        graphs.append(DecodeGraph(size, runner))
        pool = graphs[-1].capture(pool)
        marks.append(DeviceMemory.settled(device))
    kept = marks[-1].reserved - marks[0].reserved
    if more := len(ordered) - len(graphs):
        tensors = marks[2].allocated - marks[1].allocated
        kept += more * (tensors + max(0, marks[2].outside - marks[1].outside) + ALLOCATION_UNIT)
    return kept, marks[-1]


def largest_step(batch: SlotBatch, max_num_tokens: int) -> SchedulerOutput:
    """The prefill step: as many rows as there are seats, sharing all tokens, every one asking what takes most memory.

    Prompt tokens are scored too, a first chunk of them by the whole vocabulary.
    """
    rows = min(batch.max_num_rows, max_num_tokens)
    share = min(max_num_tokens // rows, batch.max_model_len)
    counts = np.full(rows, share, dtype=np.int32)
    # The first row takes what the division leaves, as far as a request may be long.
    counts[0] = min(share + max_num_tokens - share * rows, batch.max_model_len)
    params = replace(_COSTLIEST, prompt_logprobs=0)
    # One wide wish widens its chunk; a prompt longer than that would only fill the host's memory.
    wishes = [replace(params, prompt_logprobs=-1), *[params] * (rows - 1)]
    prompts = [min(int(counts[0]), PROMPT_CHUNK + 1), *counts[1:].tolist()]
    return _step(batch, counts, prompts, wishes, num_decode_rows=0)


def largest_decode_step(batch: SlotBatch, max_num_tokens: int) -> SchedulerOutput:
    """The decode step: a token in every seat, every one asking what takes most memory to sample."""
    rows = min(batch.max_num_rows, max_num_tokens)
    counts = np.ones(rows, dtype=np.int32)
    return _step(batch, counts, [1] * rows, [_COSTLIEST] * rows, num_decode_rows=rows)


def _step(
    batch: SlotBatch,
    counts: npt.NDArray[np.int32],
    prompts: Sequence[int],
    wishes: Sequence[SamplingParams],
    *,
    num_decode_rows: int,
) -> SchedulerOutput:
    """New requests in the first slots, which hold no block but the null block."""
    rows = len(counts)
    none = np.zeros(0, dtype=np.int32)
    return SchedulerOutput(
        step=-1,
        new_requests=[
            NewRequest(f"profile-{i}", i, np.zeros(int(n), dtype=np.int32), prompt, 0, wish, 0)
            for i, (n, prompt, wish) in enumerate(zip(counts, prompts, wishes, strict=True))
        ],
        slots=np.arange(rows, dtype=np.int32),
        num_scheduled_tokens=counts,
        num_computed_tokens=np.zeros(rows, dtype=np.int32),
        num_decode_rows=num_decode_rows,
        samples=np.ones(rows, dtype=np.bool_),
        output_index=np.zeros(rows, dtype=np.int32),
        new_blocks=tuple(NewBlocks(none, none, none) for _ in batch.block_tables),
    )
