"""A run of the largest step, to learn how much device memory a step takes at its peak."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from enginebay.interfaces.scheduler import NewBlocks, NewRequest, SchedulerOutput
from enginebay.sampling.params import SamplingParams
from enginebay.worker.batch import SlotBatch
from enginebay.worker.model_runner import ModelRunner
from enginebay.worker.prompt_scorer import PROMPT_CHUNK


def profile_step(runner: ModelRunner, max_num_tokens: int, device: torch.device) -> int:
    """Run the step with most tokens and most rows and return the allocator's peak in bytes.

    Every row reads and writes the null block, whose content has no meaning.
    """
    torch.cuda.reset_peak_memory_stats(device)
    runner.execute(largest_step(runner.batch, max_num_tokens))
    runner.sample()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    return peak


def largest_step(batch: SlotBatch, max_num_tokens: int) -> SchedulerOutput:
    """As many rows as there are seats, sharing all tokens, every one asking what takes most memory to sample.

    That is: filters, processors that copy the logits, and log-probabilities of the whole vocabulary. Prompt tokens are scored
    too, a first chunk of them by the whole vocabulary.
    """
    rows = min(batch.max_num_rows, max_num_tokens)
    share = min(max_num_tokens // rows, batch.max_model_len)
    counts = np.full(rows, share, dtype=np.int32)
    # The first row takes what the division leaves, as far as a request may be long.
    counts[0] = min(share + max_num_tokens - share * rows, batch.max_model_len)
    none = np.zeros(0, dtype=np.int32)
    params = SamplingParams(
        top_p=0.9,
        min_p=0.01,
        allowed_token_ids=(0, 1),
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        logprobs=-1,
        prompt_logprobs=0,
    )
    # One wide wish widens its chunk; a prompt longer than that would only fill the host's memory.
    wishes = [replace(params, prompt_logprobs=-1), *[params] * (rows - 1)]
    prompts = [min(int(counts[0]), PROMPT_CHUNK + 1), *counts[1:].tolist()]
    return SchedulerOutput(
        step=-1,
        new_requests=[
            NewRequest(f"profile-{i}", i, np.zeros(int(n), dtype=np.int32), prompt, 0, wish, 0)
            for i, (n, prompt, wish) in enumerate(zip(counts, prompts, wishes, strict=True))
        ],
        slots=np.arange(rows, dtype=np.int32),
        num_scheduled_tokens=counts,
        num_computed_tokens=np.zeros(rows, dtype=np.int32),
        num_decode_rows=0,
        samples=np.ones(rows, dtype=np.bool_),
        output_index=np.zeros(rows, dtype=np.int32),
        new_blocks=tuple(NewBlocks(none, none, none) for _ in batch.block_tables),
    )
