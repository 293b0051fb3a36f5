"""A step's result on its way to the host."""

from __future__ import annotations

import numpy as np
import torch
from enginebay.interfaces.scheduler import PromptLogprobs, SchedulerOutput
from enginebay.sampling.logprobs import score
from enginebay.sampling.pipeline import RowScores
from enginebay.worker.step_result import StepResult, done


def output(samples: list[bool]) -> SchedulerOutput:
    rows = np.arange(len(samples), dtype=np.int32)
    return SchedulerOutput(
        step=0,
        new_requests=[],
        slots=rows,
        num_scheduled_tokens=np.ones_like(rows),
        num_computed_tokens=np.zeros_like(rows),
        num_decode_rows=0,
        samples=np.array(samples),
        output_index=np.zeros_like(rows),
        new_blocks=(),
    )


def test_ids_and_counts() -> None:
    made = done(StepResult(output([True, False, True]), torch.tensor([5, 9, -1])).to_host()).result()
    assert made.token_ids.tolist() == [[5], [9], [-1]]
    assert made.token_ids.dtype == np.int32
    assert made.num_sampled.tolist() == [1, 0, 1]
    assert made.logprobs is None
    assert made.prompt_logprobs == {}


def test_a_step_amid_prompts_has_no_ids_but_may_have_scores() -> None:
    scores = score(torch.randn(3, 7), torch.tensor([1, 2, 3]), 4, as_logits=False).to_host()
    prompt = {1: PromptLogprobs(6, scores)}
    made = StepResult(output([False, False]), None, prompt=prompt).map(torch.clone).to_host()
    assert made.token_ids.shape == (2, 1)
    assert made.num_sampled.tolist() == [0, 0]
    assert made.prompt_logprobs == prompt


def test_scores_of_some_rows_stand_at_their_rows() -> None:
    logits = torch.randn(2, 7)
    scores = score(logits, torch.tensor([3, 4]), 2, as_logits=False)
    result = StepResult(output([True] * 4), torch.tensor([0, 3, 0, 4]), RowScores(np.array([1, 3]), scores))
    copies = []
    copied = result.map(lambda tensor: copies.append(tensor) or tensor.clone())  # type: ignore[func-returns-value]
    assert len(copies) == 4
    made = copied.to_host().logprobs
    assert made is not None
    assert made.token_ids[[1, 3]].tolist() == scores.token_ids.tolist()
    assert made.logprobs[[1, 3]].tolist() == scores.values.tolist()
    assert made.ranks[[1, 3]].tolist() == scores.ranks.tolist()
    assert made.of(3, 1).token_ids.tolist() == scores.token_ids[1:, :2].tolist()
    assert not made.ranks[[0, 2]].any()
