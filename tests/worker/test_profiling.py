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
from enginebay.worker.memory import ALLOCATION_UNIT
from enginebay.worker.profiling import largest_decode_step, largest_step, memory_of_graphs, peak_of_steps
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


@given(rows=st.integers(1, 9), tokens=st.integers(1, 60))
def test_the_decode_step_has_a_token_in_every_seat(rows: int, tokens: int) -> None:
    batch = make_batch(rows, tokens, 8)
    step = largest_decode_step(batch, tokens)
    assert step.num_rows == step.num_decode_rows == min(rows, tokens) == step.num_scheduled_tokens.sum()
    assert all(request.params.logprobs == -1 for request in step.new_requests)
    applied = batch.apply(step)
    assert applied.prefill is None
    assert applied.decode is not None
    assert not any(table.any() for table in batch.row_block_tables)  # the null block alone


class Device:
    """Stands for a CUDA device whose figures are set by hand; notes what happens to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.free, self.reserved, self.allocated = 9_900, 100, 80
        note = self.calls.append
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, 10_000))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.reserved)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: note("reset"))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: note("wait"))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: note("empty"))

    def peak(self, device: torch.device) -> int:
        self.calls.append("peak")
        return 777

    def take(self, reserved: int, allocated: int, outside: int) -> None:
        self.reserved += reserved
        self.allocated += allocated
        self.free -= reserved + outside


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


class Result:
    """A step's result that says when it is dropped."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def __del__(self) -> None:
        self.calls.append("drop")


class Runner:
    def __init__(self, calls: list[str]) -> None:
        self.calls, self.batch = calls, make_batch(2, 8, 8)

    def execute(self, output: Any) -> None:
        self.calls.append(f"{'decode' if output.num_decode_rows else 'prefill'} {output.num_scheduled_tokens.sum()}")

    def sample(self) -> Result:
        self.calls.append("sample")
        return Result(self.calls)


def test_the_peak_is_of_both_steps_the_first_still_in_flight_during_the_second(device: Device) -> None:
    runner: Any = Runner(device.calls)
    assert peak_of_steps(runner, 8, CPU) == 777
    steps = ["decode 2", "sample", "prefill 8", "sample", "drop"]
    assert device.calls == ["empty", "reset", *steps, "wait", "drop", "peak"]


class Graph:
    """Stands for `DecodeGraph`: the first takes what all share, each further one a little, outside torch as well."""

    device: Device
    captured: list[tuple[int, Any]]

    def __init__(self, size: int, runner: Any) -> None:
        self.size = size

    def capture(self, pool: Any) -> str:
        self.captured.append((self.size, pool))
        if pool is None:
            self.device.take(reserved=1000, allocated=400, outside=300)
        else:
            self.device.take(reserved=60, allocated=50, outside=7)
        return "pool"


@pytest.mark.parametrize(
    ("sizes", "captured", "kept"),
    [
        ([], [], 0),
        ([4], [(4, None)], 1000),
        ([4, 4], [(4, None)], 1000),
        ([1, 4], [(4, None), (1, "pool")], 1060),
        ([1, 8, 2, 4], [(8, None), (4, "pool")], 1060 + 2 * (50 + 7 + ALLOCATION_UNIT)),
    ],
)
def test_graphs_are_counted_from_the_two_largest(
    sizes: list[int], captured: Any, kept: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Graph, "device", device, raising=False)
    monkeypatch.setattr(Graph, "captured", [], raising=False)
    monkeypatch.setattr(profiling, "DecodeGraph", Graph)
    runner: Any = None
    graphs, after = memory_of_graphs(runner, sizes, CPU)
    assert (Graph.captured, graphs) == (captured, kept)
    # read while the captured ones stand, so that it holds what the driver gave them
    assert after.outside == [0, 300, 307][len(captured)]
