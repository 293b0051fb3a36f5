"""Which prompt tokens a step scores, and by which logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from enginebay.interfaces.scheduler import NewRequest, PromptLogprobs, SchedulerOutput, TokenLogprobs
from enginebay.sampling.logprobs import Scores, score
from enginebay.sampling.params import SamplingParams
from enginebay.worker import prompt_scorer
from enginebay.worker.prompt_scorer import PromptScorer
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

VOCAB, WIDTH, LENGTH = 13, 6, 40
HEAD = torch.randn(WIDTH, VOCAB, generator=torch.Generator().manual_seed(3))


def step(rows: list[tuple[int, int, int]], prompts: dict[int, int]) -> SchedulerOutput:
    """Rows of (slot, computed, taken)."""
    slots, computed, taken = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    return SchedulerOutput(
        step=0,
        new_requests=[],
        slots=slots,
        num_scheduled_tokens=taken,
        num_computed_tokens=computed,
        num_decode_rows=0,
        samples=np.array([c + t >= prompts[s] for s, c, t in rows]),
        output_index=np.zeros(len(rows), dtype=np.int32),
        new_blocks=(),
    )


def scorer(prompts: dict[int, list[int]], wanted: dict[int, int | None]) -> PromptScorer:
    token_ids = torch.zeros(len(prompts), LENGTH, dtype=torch.int32)
    for slot, prompt in prompts.items():
        token_ids[slot, : len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
    made = PromptScorer(len(prompts), token_ids, lambda hidden: hidden @ HEAD, as_logits=False)
    made.add(
        [
            NewRequest(
                "r", s, np.array(p, np.int32), len(p), 0, SamplingParams(prompt_logprobs=wanted[s], max_tokens=4), 0
            )
            for s, p in prompts.items()
        ]
    )
    return made


def check(found: PromptLogprobs, prompt: list[int], states: Tensor, start: int, end: int, num_top: int) -> None:
    assert (found.start, len(found.positions)) == (start, end - start)
    logprobs = (states[start - 1 : end - 1] @ HEAD).log_softmax(-1)
    width = VOCAB if num_top < 0 else num_top
    assert found.positions.token_ids.shape == (end - start, 1 + width)
    assert found.positions.token_ids[:, 0].tolist() == prompt[start:end]
    own = logprobs.gather(1, torch.tensor(prompt[start:end]).unsqueeze(1))
    expected = torch.cat([own, logprobs.topk(width).values], dim=1)
    torch.testing.assert_close(torch.from_numpy(found.positions.logprobs), expected, atol=1e-5, rtol=1e-5)
    assert found.positions.ranks.tolist() == (logprobs >= own).sum(1).tolist()


@given(data=st.data(), chunk=st.sampled_from([1, 3, 256]))
def test_every_token_but_the_first_is_scored_once(data: st.DataObject, chunk: int) -> None:
    """Prompts in pieces of any size, some of whose requests ask nothing, beside rows that decode."""
    count = data.draw(st.integers(1, 4))
    tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)
    prompts = {slot: data.draw(tokens) for slot in range(count)}
    wanted = {slot: data.draw(st.none() | st.sampled_from([-1, 0, 2])) for slot in range(count)}
    states = {slot: torch.randn(LENGTH, WIDTH) for slot in range(count)}
    made = scorer(prompts, wanted)
    computed = dict.fromkeys(prompts, 0)
    known = dict.fromkeys(prompts, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_scorer, "PROMPT_CHUNK", chunk)
        for _ in range(25):
            rows = [
                (slot, at, data.draw(st.integers(1, max(len(prompts[slot]) - at, 1))))
                for slot, at in computed.items()
                if at < LENGTH
            ]
            if not rows:
                break
            output = step(rows, {s: len(p) for s, p in prompts.items()})
            hidden = torch.cat([states[s][c : c + t] for s, c, t in rows])
            stretches = made.stretches(output)
            scored = made.score(stretches, output, hidden) if stretches else {}
            for row, (slot, at, taken) in enumerate(rows):
                end, num_top = min(at + taken + 1, len(prompts[slot])), wanted[slot]
                if num_top is None or end <= known[slot]:
                    assert row not in scored
                else:
                    check(scored[row], prompts[slot], states[slot], known[slot], end, num_top)
                    known[slot] = end
                computed[slot] += taken
    for slot, prompt in prompts.items():
        assert known[slot] == (
            len(prompt) if wanted[slot] is not None and computed[slot] >= len(prompt) else known[slot]
        )


def test_a_prompt_of_one_token_has_no_score() -> None:
    made = scorer({0: [4]}, {0: 3})
    assert made.stretches(step([(0, 0, 1)], {0: 1})) == []


def test_scores_leave_the_device_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a prompt and wide its wish, no call scores more than a chunk, and each is copied before the next."""
    events: list[str] = []

    def noted(logits: Tensor, token_ids: Tensor, num_top: int, *, as_logits: bool) -> Scores:
        events.append(f"score {len(logits)} {num_top}")
        return score(logits, token_ids, num_top, as_logits=as_logits)

    def copied(scores: Scores) -> TokenLogprobs:
        events.append("copy")
        return to_host(scores)

    to_host = Scores.to_host
    monkeypatch.setattr(prompt_scorer, "PROMPT_CHUNK", 4)
    monkeypatch.setattr(prompt_scorer, "score", noted)
    monkeypatch.setattr(Scores, "to_host", copied)
    prompts = {0: [1, 2, 3, 4, 5, 6, 7], 1: [3, 2, 1, 0]}
    made = scorer(prompts, {0: -1, 1: 2})
    output = step([(0, 0, 7), (1, 0, 4)], {0: 7, 1: 4})
    scored = made.score(made.stretches(output), output, torch.randn(11, WIDTH))
    # Six tokens of the one and three of the other: the last chunk is as narrow as those that share it.
    assert events == ["score 4 -1", "copy", "score 4 -1", "copy", "score 1 2", "copy"]
    assert scored[0].positions.token_ids.shape == (6, 1 + VOCAB)
    assert scored[1].positions.token_ids.shape == (3, 3)


def test_a_narrow_row_does_not_keep_its_wide_neighbour_alive() -> None:
    prompts = {0: [1, 2, 3], 1: [3, 2, 1]}
    made = scorer(prompts, {0: -1, 1: 0})
    output = step([(0, 0, 3), (1, 0, 3)], {0: 3, 1: 3})
    positions = made.score(made.stretches(output), output, torch.randn(6, WIDTH))[1].positions
    assert all(array.base is None for array in (positions.token_ids, positions.logprobs, positions.ranks))
