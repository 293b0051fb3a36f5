"""The step that memory is measured by asks whatever a step may ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from enginebay.interfaces.sampler import ProcessorContext, SamplerRows
from enginebay.plugins.records import NoOptions
from enginebay.sampling.pipeline import Sampler
from enginebay.sampling.processors.allowed import AllowedTokens
from enginebay.sampling.processors.penalties import Penalties
from enginebay.worker import profiling, prompt_scorer
from enginebay.worker.batch import SlotBatch
from enginebay.worker.profiling import largest_step, profile_step
from enginebay.worker.prompt_scorer import PromptScorer
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

VOCAB, CPU = 11, torch.device("cpu")


def make_batch(rows: int, tokens: int, length: int) -> SlotBatch:
    return SlotBatch(
        max_num_seqs=rows,
        max_num_tokens=tokens,
        max_model_len=length,
        block_size=16,
        num_groups=1,
        device=CPU,
    )


@given(rows=st.integers(1, 9), tokens=st.integers(1, 60), length=st.integers(2, 40))
def test_it_has_the_most_rows_and_tokens_that_fit(rows: int, tokens: int, length: int) -> None:
    step = largest_step(make_batch(rows, tokens, length), tokens)
    assert step.num_rows == min(rows, tokens)
    assert step.num_scheduled_tokens.max() <= length
    assert step.num_scheduled_tokens.sum() <= tokens
    assert step.samples.all()
    assert [len(request.token_ids) for request in step.new_requests] == step.num_scheduled_tokens.tolist()


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_every_row_is_processed_and_scored(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 copies of all rows' logits are made: by processors, by filters and for log-probabilities."""
    applied: list[tuple[str, int]] = []

    def noting(name: str, apply: Callable[..., None]) -> Callable[..., None]:
        def noted(self: Any, logits: Tensor, rows: SamplerRows) -> None:
            assert logits.dtype == torch.float32
            applied.append((name, len(logits)))
            apply(self, logits, rows)

        return noted

    for kind in (AllowedTokens, Penalties):
        monkeypatch.setattr(kind, "apply", noting(kind.__name__, kind.apply))
    batch = make_batch(4, 30, 20)
    step = largest_step(batch, 30)
    context = ProcessorContext(vocab_size=VOCAB, max_num_seqs=4, max_model_len=20, device=CPU, options=NoOptions())
    sampler = Sampler(context, (), mode)
    sampler.add(step.new_requests)
    batch.apply(step)
    rows = batch.sampling_rows(step)
    assert (rows.all_greedy, rows.any_top_k_or_p, rows.any_min_p) == (False, True, True)
    logits = torch.randn(4, VOCAB, dtype=torch.bfloat16)
    sampled = sampler.sample(logits, rows, step.slots, step.samples, lambda: batch.sampler_rows(step))
    assert applied == [("AllowedTokens", 4), ("Penalties", 4)]
    assert sampled.logprobs is not None
    assert sampled.logprobs.scores.values.shape == (4, 1 + VOCAB)


@pytest.mark.parametrize(("rows", "first"), [(1, 8), (4, 8)])
def test_a_whole_chunk_of_prompt_is_scored_by_the_whole_vocabulary(
    rows: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But no more than a chunk, however long the one row: it would all lie in the host's memory."""
    monkeypatch.setattr(profiling, "PROMPT_CHUNK", 8)
    monkeypatch.setattr(prompt_scorer, "PROMPT_CHUNK", 8)
    batch = make_batch(rows, 24, 24)
    step = largest_step(batch, 24)
    chunks: list[int] = []

    def head(hidden: Tensor) -> Tensor:
        chunks.append(len(hidden))
        return hidden

    scorer = PromptScorer(rows, batch.token_ids, head, as_logits=False)
    scorer.add(step.new_requests)
    batch.apply(step)
    scored = scorer.score(scorer.stretches(step), step, torch.randn(24, VOCAB))
    assert chunks[0] == first
    assert scored[0].positions.token_ids.shape[1] == 1 + VOCAB
    assert sum(len(s.positions) for s in scored.values() if s.positions.token_ids.shape[1] > 1) <= 8


def test_the_peak_is_read_after_the_step_was_run_and_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Runner:
        batch = make_batch(2, 8, 8)

        def execute(self, output: Any) -> None:
            calls.append(f"execute {output.num_scheduled_tokens.sum()}")

        def sample(self) -> None:
            calls.append("sample")

    def peak(device: torch.device) -> int:
        calls.append("peak")
        return 77

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peak)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    runner: Any = Runner()
    assert profile_step(runner, 8, CPU) == 77
    assert calls == ["reset", "execute 8", "sample", "wait", "peak", "empty"]
