"""The example logits processors through the whole engine: their rule holds, and who did not ask is not touched."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from enginebay import LLM, SamplingParams
from enginebay.errors import RequestError

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPTS: list[Any] = [{"prompt_token_ids": [2, 5, 3, 5] * n} for n in (1, 2, 5, 9)]


def params(said: dict[str, Any] | None = None, temperature: float = 0.0) -> SamplingParams:
    """Few tokens are allowed, so that they recur."""
    return SamplingParams(
        temperature=temperature,
        seed=7,
        max_tokens=40,
        ignore_eos=True,
        detokenize=False,
        allowed_token_ids=range(12),
        extra_args=said or {},
    )


def tokens(llm: LLM, wanted: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, wanted)]


def repeats(text: list[int], start: int = 0) -> int:
    """Pairs that end at or behind `start` and stood before."""
    runs = list(pairwise(text))
    return sum(runs[i] in runs[:i] for i in range(max(start - 1, 1), len(runs)))


# the second pool is so small that requests are preempted, and enter again
@pytest.mark.parametrize("num_blocks", [64, 14])
def test_no_pair_of_tokens_occurs_twice(tiny_model: str, num_blocks: int) -> None:
    with LLM(tiny_model, dtype="float32", device="cpu") as llm:
        plain = tokens(llm, params())
    assert all(repeats(line) for line in plain)
    cache = {"num_blocks": num_blocks, "block_size": 8}
    processors = {"processors": ["no_repeat_ngram"]}
    file = str(EXAMPLES / "no_repeat_ngram.py")
    with LLM(tiny_model, dtype="float32", device="cpu", plugins=[file], sampler=processors, cache=cache) as llm:
        asks = params({"no_repeat_ngram": {"n": 2}})
        mixed = tokens(llm, [asks, params(), asks, params({"no_repeat_ngram": {"n": 2, "prompt_too": False}})])
        with pytest.raises(RequestError, match=r"extra_args\.no_repeat_ngram\.n"):
            llm.generate(PROMPTS[0], params({"no_repeat_ngram": {"n": 1}}))
        assert (llm.stats().num_preemptions > 0) == (num_blocks == 14)
    prompts = [prompt["prompt_token_ids"] for prompt in PROMPTS]
    for row in (0, 2):
        assert repeats(prompts[row] + mixed[row], len(prompts[row])) == 0
    assert mixed[1] == plain[1]
    assert repeats(mixed[3]) == 0


def test_nothing_but_the_likeliest_is_drawn_at_no_deviation(tiny_model: str) -> None:
    file = str(EXAMPLES / "top_n_sigma.py")
    with LLM(tiny_model, dtype="float32", plugins=[file], sampler={"processors": ["top_n_sigma"]}) as llm:
        greedy, drawn = tokens(llm, params()), tokens(llm, params(temperature=3.0))
        narrow = tokens(llm, params({"top_n_sigma": {"n": 0}}, temperature=3.0))
        wide = tokens(llm, params({"top_n_sigma": {"n": 100}}, temperature=3.0))
    assert narrow == greedy
    assert wide == drawn != greedy
