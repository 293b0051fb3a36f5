"""The real Gemma 3, where someone has accepted its terms and fetched it: greedy float32 tokens equal transformers'."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from enginebay import LLM, SamplingParams
from enginebay.loading.tokenizer import load_tokenizer
from enginebay.models.catalogue import find
from enginebay.models.reference import resolve_model

pytestmark = pytest.mark.full

MAX_TOKENS = 24
WINDOW = 512
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "日本の首都は",
    "It was the best of times, it was the worst of times. " * 60,
    " ".join(str(n) for n in range(300)),
]
SCHEDULERS: dict[str, dict[str, Any]] = {
    "plain": {"chunked_prefill": False, "max_num_batched_tokens": 2048},
    # no divisor of the window, so chunks end inside of it
    "chunked": {"max_num_batched_tokens": 200},
    "one seat": {"max_num_seqs": 1},
}


@pytest.fixture(scope="module")
def path() -> Path:
    model = find("gemma3-270m")
    if not model.is_cached:
        pytest.skip(
            f"{model.name} is not in the cache; its terms are accepted with: enginebay models fetch {model.name}"
        )
    return model.path


@pytest.fixture(scope="module")
def prompts(path: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(resolve_model(str(path)))
    return [tokenizer(text)["input_ids"] for text in PROMPTS]


@pytest.fixture(scope="module")
def expected(path: Path, prompts: list[list[int]], maker: ModuleType) -> list[list[int]]:
    model = maker.transformers_model(path)
    return [maker.greedy(model, prompt, None, MAX_TOKENS) for prompt in prompts]


def test_some_prompts_are_longer_than_the_window(prompts: list[list[int]]) -> None:
    assert [len(prompt) > WINDOW for prompt in prompts] == [False, False, False, True, True]


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_tokens_equal_transformers(
    path: Path, prompts: list[list[int]], expected: list[list[int]], scheduler: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with LLM(model=str(path), dtype="float32", device="cpu", max_model_len=2048, scheduler=scheduler) as llm:
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    assert [list(result.outputs[0].token_ids) for result in results] == expected
