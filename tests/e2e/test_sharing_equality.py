"""Greedy float32 tokens stay what they are under prefix hits, priorities, preemption at every step, and several completions."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from enginebay import LLM, SamplingParams
from enginebay.interfaces.scheduler import SchedulerStats

Stats = Callable[[LLM], SchedulerStats]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, detokenize=False)


def prompts(rows: list[Any]) -> list[Any]:
    return [{"prompt_token_ids": row.prompt} for row in rows]


def answers(llm: LLM, asked: list[Any], params: SamplingParams = GREEDY, **values: Any) -> list[list[list[int]]]:
    return [[list(c.token_ids) for c in output.outputs] for output in llm.generate(asked, params, **values)]


# --- the real model, against transformers


@pytest.mark.model
@pytest.mark.parametrize(
    "scheduler",
    [
        {"max_num_seqs": 32, "max_num_batched_tokens": 48},
        {"max_num_seqs": 4, "async_scheduling": False},
    ],
    ids=["chunked-async", "whole-sync"],
)
def test_a_warm_prefix_cache_changes_no_token_of_a_real_model(
    smollm2: Path, reference: Any, idle_stats: Stats, scheduler: dict[str, Any]
) -> None:
    """Cold, warm, and after a reset; and hits are what made it warm."""
    rows = reference.rows[::2]
    params = SamplingParams(temperature=0.0, max_tokens=reference.max_tokens)
    with LLM(str(smollm2), dtype="float32", device="cpu", max_model_len=2048, scheduler=scheduler) as llm:
        hits = []
        for _ in range(2):
            assert answers(llm, prompts(rows), params) == [[row.output] for row in rows]
            hits.append(idle_stats(llm).num_prefix_hits)
        llm.reset_prefix_cache()
        assert answers(llm, prompts(rows), params) == [[row.output] for row in rows]
        hits.append(idle_stats(llm).num_prefix_hits)
    assert hits[1] - hits[0] > sum(len(row.prompt) for row in rows) / 2
    assert hits[2] - hits[1] < hits[1] - hits[0]


@pytest.mark.model
def test_shuffled_priorities_change_no_token_of_a_real_model(smollm2: Path, reference: Any, idle_stats: Stats) -> None:
    """C18-C20: three seats and a short pool, urgent ones arriving behind the others."""
    rows = reference.rows[::3]
    priorities = random.Random(3).choices(range(-3, 4), k=len(rows))
    params = SamplingParams(temperature=0.0, max_tokens=reference.max_tokens)
    scheduler = {"policy": "priority", "max_num_seqs": 3, "max_num_batched_tokens": 64}
    with LLM(
        str(smollm2), dtype="float32", device="cpu", max_model_len=1024, scheduler=scheduler, cache={"num_blocks": 80}
    ) as llm:
        first = llm.stream(prompts(rows)[0], params, priority=9)
        next(first)
        assert answers(llm, prompts(rows), params, priority=priorities) == [[row.output] for row in rows]
        assert [list(o.outputs[0].token_ids) for o in first][-1:] in ([], [rows[0].output])
        assert idle_stats(llm).num_preemptions > 0


@pytest.mark.model
def test_several_completions_of_a_real_model_share_their_prompt(
    smollm2: Path, reference: Any, idle_stats: Stats
) -> None:
    rows = [reference.rows[i] for i in (0, 12, 29)]
    params = SamplingParams(temperature=0.0, max_tokens=reference.max_tokens, n=3)
    with LLM(str(smollm2), dtype="float32", device="cpu", max_model_len=2048) as llm:
        assert answers(llm, prompts(rows), params) == [[row.output] * 3 for row in rows]
        assert idle_stats(llm).num_prefix_hits >= 2 * sum((len(row.prompt) - 1) // 16 * 16 for row in rows)


# --- a tiny model, against its own plain run


@pytest.fixture(scope="module")
def asked() -> list[Any]:
    dice = random.Random(5)
    shared = [dice.randrange(2, 96) for _ in range(40)]
    return [
        {
            "prompt_token_ids": shared[: dice.randrange(0, 40)]
            + [dice.randrange(2, 96) for _ in range(dice.randrange(1, 30))]
        }
        for _ in range(6)
    ]


@pytest.fixture(scope="module")
def plain(tiny_model: str, asked: list[Any]) -> list[list[list[int]]]:
    with LLM(tiny_model, dtype="float32", cache={"prefix_caching": False}, scheduler={"max_num_seqs": 1}) as llm:
        return answers(llm, asked)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("whom", ["all", "last", "first"])
def test_preemption_at_every_step_changes_no_token(
    tiny_model: str,
    asked: list[Any],
    plain: list[list[list[int]]],
    idle_stats: Stats,
    prefix_caching: bool,
    asynchronous: bool,
    whom: str,
) -> None:
    scheduler = {"async_scheduling": asynchronous, "max_num_batched_tokens": 32, "max_num_seqs": 4}
    with LLM(tiny_model, dtype="float32", scheduler=scheduler, cache={"prefix_caching": prefix_caching}) as llm:
        core = llm._client._core.scheduler  # type: ignore[attr-defined]
        streams = [llm.stream(prompt, GREEDY) for prompt in asked]
        found: list[list[int]] = [[] for _ in streams]
        for i, stream in enumerate(streams):
            for output in stream:
                found[i] = list(output.outputs[0].token_ids)
                running = core._running()
                for request in running if whom == "all" else running[-1:] if whom == "last" else running[:1]:
                    core._preempt(request)
        assert [[tokens] for tokens in found] == plain
        assert idle_stats(llm).num_preemptions >= 20


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_any_arrangement_gives_the_plain_tokens(
    tiny_model: str, asked: list[Any], plain: list[list[list[int]]], idle_stats: Stats, prefix_caching: bool
) -> None:
    for seed in range(6):
        dice = random.Random(seed)
        block = dice.choice([1, 4, 16])
        blocks = -(-110 // block) + dice.randrange(1, 30)
        scheduler = {
            "policy": "priority",
            "max_num_seqs": dice.randrange(1, 7),
            "max_num_batched_tokens": dice.choice([7, 16, 512]),
            "max_prefill_tokens": dice.choice(["auto", 5]),
            "async_scheduling": dice.random() < 0.5,
        }
        cache = {"prefix_caching": prefix_caching, "block_size": block, "num_blocks": blocks}
        with LLM(tiny_model, dtype="float32", scheduler=scheduler, cache=cache) as llm:
            for _ in range(2):
                order = dice.sample(range(len(asked)), len(asked))
                ranks = [dice.randrange(3) for _ in order]
                assert answers(llm, [asked[i] for i in order], priority=ranks) == [plain[i] for i in order]
            idle_stats(llm)
