"""Greedy float32 tokens equal transformers' on a real model, under every arrangement of the engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from enginebay import LLM, SamplingParams
from enginebay.errors import RequestError
from enginebay.interfaces.scheduler import SchedulerStats

pytestmark = pytest.mark.model

Stats = Callable[[LLM], SchedulerStats]
CHUNKED = {"on": {"max_num_batched_tokens": 48}, "off": {"chunked_prefill": False, "max_num_batched_tokens": 2048}}
SEATS = {"1": {"max_num_seqs": 1}, "32": {"max_num_seqs": 32}}
ASYNC = {"async": {"async_scheduling": True}, "sync": {"async_scheduling": False}}
#: every pair of values of two factors occurs in one of these
PAIRWISE = [("on", "32", "async"), ("off", "32", "sync"), ("on", "1", "sync"), ("off", "1", "async")]
PRODUCT = list(itertools.product(CHUNKED, SEATS, ASYNC))
#: rows that are checked where all would take too long: chat, code, right-to-left, long
SOME = (0, 12, 22, 29)


def engine(model: Path, **tree: Any) -> LLM:
    return LLM(model=str(model), dtype="float32", device="cpu", max_model_len=2048, **tree)


def prompts(rows: list[Any]) -> list[Any]:
    return [{"prompt_token_ids": row.prompt} for row in rows]


def greedy(max_tokens: int, **values: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **values)


def scheduler_of(chunked: str, seats: str, asynchronous: str) -> dict[str, Any]:
    return {**CHUNKED[chunked], **SEATS[seats], **ASYNC[asynchronous]}


def check(llm: LLM, reference: Any, rows: list[Any]) -> None:
    """Tokens and reasons of all rows at once."""
    assert list(llm.info.eos_token_ids) == reference.eos
    results = [r.outputs[0] for r in llm.generate(prompts(rows), greedy(reference.max_tokens))]
    assert [list(r.token_ids) for r in results] == [row.output for row in rows]
    ends = ["stop" if row.output[-1] in reference.eos else "length" for row in rows]
    assert [r.finish_reason for r in results] == ends


def test_the_reference_is_varied(reference: Any) -> None:
    """Short and long prompts, answers that end by themselves and ones that are cut, and no two answers alike."""
    lengths = [len(row.prompt) for row in reference.rows]
    assert len(lengths) == 32
    assert min(lengths) == 1
    assert max(lengths) > 600
    assert {row.output[-1] in reference.eos for row in reference.rows} == {True, False}
    assert len({tuple(row.output) for row in reference.rows}) == 32


@pytest.mark.parametrize(("chunked", "seats", "asynchronous"), PAIRWISE)
def test_tokens_equal_transformers(
    smollm2: Path, reference: Any, idle_stats: Stats, chunked: str, seats: str, asynchronous: str
) -> None:
    # One seat takes the prompts one by one: a part of them is enough for the pair.
    rows = reference.rows if seats == "32" else [*reference.rows[::5], reference.rows[SOME[-1]]]
    with engine(smollm2, scheduler=scheduler_of(chunked, seats, asynchronous)) as llm:
        check(llm, reference, rows)
        idle_stats(llm)


@pytest.mark.full
@pytest.mark.parametrize(("chunked", "seats", "asynchronous"), PRODUCT)
def test_tokens_equal_transformers_in_every_arrangement(
    smollm2: Path, reference: Any, idle_stats: Stats, chunked: str, seats: str, asynchronous: str
) -> None:
    with engine(smollm2, scheduler=scheduler_of(chunked, seats, asynchronous)) as llm:
        check(llm, reference, reference.rows)
        idle_stats(llm)


@pytest.mark.parametrize(("chunked", "asynchronous"), [("on", "async"), ("off", "sync")])
def test_preemption_changes_no_token(
    smollm2: Path, reference: Any, idle_stats: Stats, chunked: str, asynchronous: str
) -> None:
    # Longer answers than the scheduler's headroom, in a pool that holds two of the six.
    with engine(smollm2, scheduler=scheduler_of(chunked, "32", asynchronous), cache={"num_blocks": 14}) as llm:
        results = llm.generate(prompts(reference.long), greedy(reference.long_tokens, ignore_eos=True))
        assert [list(r.outputs[0].token_ids) for r in results] == [row.output for row in reference.long]
        stats = idle_stats(llm)
    assert stats.num_preemptions > 0
    assert stats.num_blocks == 14


def test_the_reference_is_transformers_own(smollm2: Path, reference: Any, maker: ModuleType) -> None:
    """The stored tokens are what the installed transformers gives today, for a few prompts."""
    model = maker.transformers_model(smollm2)
    for row in (reference.rows[i] for i in SOME):
        assert maker.greedy(model, row.prompt, reference.eos) == row.output


@pytest.mark.full
def test_the_whole_reference_is_transformers_own(smollm2: Path, reference: Any, maker: ModuleType) -> None:
    model = maker.transformers_model(smollm2)
    for row in reference.rows:
        assert maker.greedy(model, row.prompt, reference.eos) == row.output
    for row in reference.long:
        assert maker.greedy(model, row.prompt, None, reference.long_tokens) == row.output


def test_a_seeded_draw_does_not_depend_on_its_neighbours(smollm2: Path, reference: Any) -> None:
    """C34: equal seeds give equal tokens whatever else is in the batch, chunked or not; other seeds differ."""
    [prompt] = prompts(reference.rows[:1])
    seeded = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=7, max_tokens=16)
    other = SamplingParams(temperature=1.2, max_tokens=16)
    with engine(smollm2) as llm:
        alone = llm.generate([prompt], seeded)[0].outputs[0].token_ids
        mixed = llm.generate([prompt, prompt, prompt], [other, seeded, greedy(16)])
        unseeded = llm.generate([prompt] * 4, other)
    with engine(smollm2, scheduler={"max_num_batched_tokens": 16, "max_num_seqs": 4}) as llm:
        chunked = llm.generate([prompt, prompt], [other, seeded])
    assert mixed[1].outputs[0].token_ids == chunked[1].outputs[0].token_ids == alone
    assert len({tuple(r.outputs[0].token_ids) for r in unseeded}) > 1


def test_bad_requests_leave_a_running_answer_as_it_is(smollm2: Path, reference: Any, idle_stats: Stats) -> None:
    """Every step of an answer is followed by a refused request and an aborted one."""
    row = reference.rows[29]
    [prompt] = prompts([row])
    vocab = 49152
    bad: list[Any] = [
        {"prompt_token_ids": []},
        {"prompt_token_ids": [vocab]},
        {"prompt_token_ids": [5] * 3000},
        {"prompt_token_ids": [5] * 2000},  # max_model_len would allow it, the pool does not
        {"tokens": [5]},
        "\ud800",
    ]
    with engine(smollm2, cache={"num_blocks": 100}, scheduler={"max_num_batched_tokens": 256}) as llm:
        assert llm.info.vocab_size == vocab
        refusals = itertools.cycle(bad)
        tokens: list[int] = []
        with llm.stream(prompt, greedy(reference.max_tokens)) as stream:
            for output in stream:
                tokens = list(output.outputs[0].token_ids)
                with pytest.raises(RequestError):
                    llm.generate(next(refusals), greedy(8))
                with llm.stream(prompts([reference.rows[0]])[0], greedy(8)):
                    pass
        assert tokens == row.output
        idle_stats(llm)
        check(llm, reference, reference.rows[:2])
