"""Stop strings, several completions, metrics, salts and priorities before a real engine with a random tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from enginebay import LLM, SamplingParams
from enginebay.errors import RequestError
from enginebay.interfaces.scheduler import SchedulerStats

PROMPT: Any = {"prompt_token_ids": [7, 3, 20, 41, 5, 66, 12, 9, 33, 2, 18, 54, 71, 8, 90, 14, 27, 6]}
OTHER: Any = {"prompt_token_ids": [50, 51, 52]}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
Idle = Callable[[LLM], SchedulerStats]


def engine(model: str, **tree: Any) -> LLM:
    return LLM(model, dtype="float32", device="cpu", **tree)


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def llm(tiny_model: str, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with engine(tiny_model, scheduler={"async_scheduling": request.param}) as made:
        yield made


def across(text: str) -> str:
    """A stop string that begins in the middle of a word of `text` and ends in the middle of the next one."""
    middle = text.index(" ", len(text) // 2)
    return text[middle - 1 : middle + 2]


def test_a_stop_string_across_tokens_ends_one_request_alone_c42_c43(llm: LLM, idle_stats: Idle) -> None:
    full, other = (o.outputs[0] for o in llm.generate([PROMPT, OTHER], GREEDY))
    stop = across(full.text)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop=stop)
    expected = full.text[: full.text.index(stop)]
    cut, neighbour = (o.outputs[0] for o in llm.generate([PROMPT, OTHER], [params, GREEDY]))
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (expected, "stop", stop)
    assert cut.token_ids == full.token_ids[: len(cut.token_ids)]
    assert stop in " ".join(f"w{t}" for t in cut.token_ids)
    assert stop not in " ".join(f"w{t}" for t in cut.token_ids[:-1])
    assert neighbour.token_ids == other.token_ids
    items = [o.outputs[0] for o in llm.stream(PROMPT, params)]
    assert "".join(i.delta for i in items) == items[-1].text == expected
    assert items[-1].token_ids == cut.token_ids
    idle_stats(llm)


def test_a_stop_string_waits_for_min_tokens(llm: LLM) -> None:
    [full] = llm.generate(PROMPT, GREEDY)
    for min_tokens in (5, 6):
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop="w", min_tokens=min_tokens)
        [output] = llm.generate(PROMPT, params)
        assert output.outputs[0].token_ids == full.outputs[0].token_ids[: min_tokens + 1]
        assert output.outputs[0].text == "".join(f" w{t}" for t in full.outputs[0].token_ids[:min_tokens]) + " "


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_completions_are_what_their_seeds_give_alone(tiny_model: str, idle_stats: Idle, prefix_caching: bool) -> None:
    def sampled(seed: int, n: int = 1) -> SamplingParams:
        return SamplingParams(n=n, seed=seed, temperature=1.5, max_tokens=12, ignore_eos=True)

    with engine(tiny_model, cache={"prefix_caching": prefix_caching, "block_size": 16}) as llm:
        alone = [llm.generate(PROMPT, sampled(5 + i))[0].outputs[0].token_ids for i in range(4)]
        llm.reset_prefix_cache()
        before = idle_stats(llm)
        family, single = llm.generate([PROMPT, OTHER], [sampled(5, n=4), GREEDY])
        after = idle_stats(llm)
        assert [c.token_ids for c in family.outputs] == alone
        assert len({tuple(tokens) for tokens in alone}) > 1
        assert single.outputs[0].finish_reason == "length"
        # Three siblings find the first block of the leader's prompt, with or without a cache for everybody.
        assert after.num_prefix_hits - before.num_prefix_hits == 3 * 16
        assert family.num_cached_tokens == 0


def test_a_family_that_is_left_holds_nothing(llm: LLM, idle_stats: Idle) -> None:
    """C47: before the first step, while siblings wait for their leader, and while all run."""
    params = SamplingParams(n=3, max_tokens=24, ignore_eos=True)
    for num_steps in (0, 1, 2, 5):
        with llm.stream(PROMPT, params):
            for _ in range(num_steps):
                llm._driver.advance()
        idle_stats(llm)
    assert [c.finish_reason for c in llm.generate(PROMPT, params)[0].outputs] == ["length"] * 3


def test_times_and_hits_are_told(llm: LLM) -> None:
    cold, warm = (llm.generate(PROMPT, GREEDY)[0] for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 16)
    metrics = warm.metrics
    assert metrics.first_scheduled_time is not None
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time <= metrics.finished_time
    assert metrics.num_output_tokens == 24


def test_salts_and_a_reset_keep_prompts_apart_c27_c31(llm: LLM) -> None:
    def hits(prompt: Any) -> int | None:
        return llm.generate(prompt, GREEDY)[0].num_cached_tokens

    salted = {**PROMPT, "cache_salt": "a"}
    assert [hits(p) for p in (PROMPT, salted, {**PROMPT, "cache_salt": "b"}, salted, PROMPT)] == [0, 0, 0, 16, 16]
    llm.reset_prefix_cache()
    assert [hits(PROMPT), hits(salted)] == [0, 0]


def test_a_priority_is_refused_where_it_would_be_ignored_c6(tiny_model: str, llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"^prompts\[1\]: .*priority=-1 would be ignored"):
        llm.generate([PROMPT, OTHER], GREEDY, priority=[0, -1])
    assert llm.stats().num_waiting == 0
    with engine(tiny_model, scheduler={"policy": "priority", "max_num_seqs": 1}) as ordered:
        outputs = ordered.generate([PROMPT, OTHER, OTHER], GREEDY, priority=[0, 5, -5])
        ends = [o.metrics.finished_time or 0.0 for o in outputs]
        assert ends[2] < ends[0] < ends[1]
