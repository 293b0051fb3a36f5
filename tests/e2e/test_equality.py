"""Greedy float32 tokens equal transformers' on a real model, under every arrangement of the engine."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from enginebay import LLM, SamplingParams

pytestmark = pytest.mark.model

REFERENCE = json.loads((Path(__file__).parent / "data" / "reference.json").read_text(encoding="utf-8"))
ROWS: list[dict[str, list[int]]] = REFERENCE["rows"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=REFERENCE["max_tokens"])

CHUNKED = {"on": {"max_num_batched_tokens": 48}, "off": {"chunked_prefill": False, "max_num_batched_tokens": 2048}}
SEATS = {"1": {"max_num_seqs": 1}, "32": {"max_num_seqs": 32}}
ASYNC = {"async": {"async_scheduling": True}, "sync": {"async_scheduling": False}}
#: every pair of values of two factors occurs in one of these
PAIRWISE = [("on", "32", "async"), ("off", "32", "sync"), ("on", "1", "sync"), ("off", "1", "async")]
PRODUCT = list(itertools.product(CHUNKED, SEATS, ASYNC))


@contextmanager
def engine(model: Path, **tree: Any) -> Iterator[LLM]:
    with LLM(model=str(model), dtype="float32", device="cpu", max_model_len=2048, **tree) as llm:
        yield llm


def answers(llm: LLM, rows: list[dict[str, list[int]]]) -> list[list[int]]:
    results = llm.generate([{"prompt_token_ids": row["prompt"]} for row in rows], PARAMS)
    return [list(result.outputs[0].token_ids) for result in results]


def expected(rows: list[dict[str, list[int]]]) -> list[list[int]]:
    return [row["output"] for row in rows]


def free_and_all(llm: LLM) -> tuple[int, int]:
    stats = llm._client._core.stats()  # type: ignore[attr-defined]
    return stats.num_free_blocks, stats.num_blocks


def scheduler_of(chunked: str, seats: str, asynchronous: str) -> dict[str, Any]:
    return {**CHUNKED[chunked], **SEATS[seats], **ASYNC[asynchronous]}


def test_the_reference_is_varied() -> None:
    lengths = [len(row["prompt"]) for row in ROWS]
    assert len(ROWS) >= 32
    assert min(lengths) == 1
    assert max(lengths) > 400


@pytest.mark.parametrize(("chunked", "seats", "asynchronous"), PAIRWISE)
def test_tokens_equal_transformers(smollm2: Path, chunked: str, seats: str, asynchronous: str) -> None:
    # One seat takes the prompts one by one: a part of them is enough for the pair.
    rows = ROWS if seats == "32" else ROWS[::4]
    with engine(smollm2, scheduler=scheduler_of(chunked, seats, asynchronous)) as llm:
        assert answers(llm, rows) == expected(rows)
        free, total = free_and_all(llm)
        assert free == total


@pytest.mark.full
@pytest.mark.parametrize(("chunked", "seats", "asynchronous"), PRODUCT)
def test_tokens_equal_transformers_in_every_arrangement(
    smollm2: Path, chunked: str, seats: str, asynchronous: str
) -> None:
    with engine(smollm2, scheduler=scheduler_of(chunked, seats, asynchronous)) as llm:
        assert answers(llm, ROWS) == expected(ROWS)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_preemption_changes_no_token(smollm2: Path, asynchronous: bool) -> None:
    # Longer answers than the scheduler's headroom, in a pool that holds two of the six.
    rows = [row for row in ROWS if len(row["prompt"]) < 20][:6]
    prompts: list[Any] = [{"prompt_token_ids": row["prompt"]} for row in rows]
    params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    with engine(smollm2) as llm:
        wanted = [r.outputs[0].token_ids for r in llm.generate(prompts, params)]
    with engine(
        smollm2, scheduler={"max_num_seqs": 6, "async_scheduling": asynchronous}, cache={"num_blocks": 14}
    ) as llm:
        assert [r.outputs[0].token_ids for r in llm.generate(prompts, params)] == wanted
        assert llm._client._core.stats().num_preemptions > 0  # type: ignore[attr-defined]
        free, total = free_and_all(llm)
        assert free == total == 14


def test_the_reference_is_transformers_own(smollm2: Path) -> None:
    """The stored tokens are what the installed transformers gives today, for a few prompts."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("make_reference", Path(__file__).parent / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    model = maker.transformers_model(smollm2)
    for row in (ROWS[0], ROWS[12], ROWS[20]):
        assert maker.greedy(model, row["prompt"], REFERENCE["eos"]) == row["output"]


def test_a_seeded_draw_does_not_depend_on_its_neighbours(smollm2: Path) -> None:
    """C34: equal seeds give equal tokens whatever else is in the batch, chunked or not; other seeds differ."""
    prompt: Any = {"prompt_token_ids": ROWS[0]["prompt"]}
    seeded = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=7, max_tokens=16)
    other = SamplingParams(temperature=1.2, max_tokens=16)
    with engine(smollm2) as llm:
        alone = llm.generate([prompt], seeded)[0].outputs[0].token_ids
        mixed = llm.generate([prompt, prompt, prompt], [other, seeded, PARAMS])
        unseeded = llm.generate([prompt] * 4, other)
    assert mixed[1].outputs[0].token_ids == alone
    assert len({tuple(r.outputs[0].token_ids) for r in unseeded}) > 1
