"""Logits processors and log-probabilities before a real engine, against transformers on a random tiny model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from enginebay import LLM, SamplingParams
from torch import Tensor

PROMPTS: list[Any] = [{"prompt_token_ids": [(7 * i + 3 * n) % 96 for i in range(n)]} for n in (1, 5, 16, 40, 70)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}


def engine(model: str, **tree: Any) -> LLM:
    return LLM(model, dtype="float32", device="cpu", **tree)


def tokens(llm: LLM, params: Any, prompts: Any = PROMPTS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def wordy_model(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model with a tokenizer that reads several words."""
    folder = tmp_path_factory.mktemp("wordy") / "model"
    shutil.copytree(tiny_model, folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    file.write_text(json.dumps({**tokenizer, "pre_tokenizer": {"type": "WhitespaceSplit"}}))
    return str(folder)


@pytest.fixture(scope="module")
def hf(tiny_model: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@torch.no_grad()
def logits_of(hf: Any, token_ids: list[int]) -> Tensor:
    logits: Tensor = hf(torch.tensor([token_ids])).logits[0].float()
    return logits


def mixed() -> list[SamplingParams]:
    """One a prompt, each asking for something else, one for nothing."""
    return [
        SamplingParams(temperature=0.0, max_tokens=56, repetition_penalty=1.4, ignore_eos=True),
        SamplingParams(
            temperature=0.9, seed=5, max_tokens=56, frequency_penalty=1.5, presence_penalty=0.5, ignore_eos=True
        ),
        SamplingParams(
            temperature=0.0, max_tokens=56, bad_words=["w3", "w77", "w5 w9"], presence_penalty=1.0, ignore_eos=True
        ),
        SamplingParams(temperature=1.2, seed=8, max_tokens=56, min_tokens=30, stop_token_ids=list(range(48))),
        SamplingParams(temperature=0.0, max_tokens=56, ignore_eos=True),
    ]


def test_two_steps_in_flight_and_preemption_change_nothing_c35(wordy_model: str) -> None:
    """Penalties, bad words and min_tokens see the tokens that the host does not know yet."""
    found = []
    for scheduler, cache in (
        ({"async_scheduling": False, "max_num_seqs": 1}, {}),
        ({"async_scheduling": True}, {}),
        ({"async_scheduling": True, "max_num_batched_tokens": 12, "max_num_seqs": 4}, {}),
        ({"async_scheduling": True}, {"num_blocks": 9, "block_size": 16, "prefix_caching": False}),
    ):
        with engine(wordy_model, scheduler=scheduler, cache=cache) as llm:
            found.append((tokens(llm, mixed()), tokens(llm, mixed())))
            preempted = llm.stats().num_preemptions
    assert preempted > 0
    assert found[0][0] == found[0][1]
    assert found == [found[0]] * 4
    with engine(wordy_model) as llm:
        bare = [SamplingParams(temperature=p.temperature, seed=p.seed, max_tokens=56, ignore_eos=True) for p in mixed()]
        plain = tokens(llm, bare)
    assert [ours != theirs for ours, theirs in zip(found[0][0], plain, strict=True)] == [True, True, True, True, False]


@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def llm(wordy_model: str, request: pytest.FixtureRequest) -> Iterator[LLM]:
    scheduler = {"async_scheduling": request.param, "max_num_batched_tokens": 24}
    with engine(wordy_model, scheduler=scheduler) as made:
        yield made


def test_repetition_penalty_equals_transformers(llm: LLM, hf: Any) -> None:
    ours = tokens(llm, SamplingParams(**GREEDY, repetition_penalty=1.3))
    for prompt, answer in zip(PROMPTS, ours, strict=True):
        ids = torch.tensor([prompt["prompt_token_ids"]])
        theirs = hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=16,
            min_new_tokens=16,
            eos_token_id=None,
            pad_token_id=0,
            repetition_penalty=1.3,
        )
        assert answer == theirs[0, ids.shape[1] :].tolist()


def test_bad_words_do_not_occur(llm: LLM) -> None:
    """A token of the greedy answer, and a pair of them; both answers are equal up to there."""
    for prompt, answer in zip(PROMPTS, tokens(llm, SamplingParams(**GREEDY)), strict=True):
        pair, word = (answer[4], answer[5]), answer[9]
        bad_words = [f"w{pair[0]} w{pair[1]}", f"w{word}"]
        [changed] = tokens(llm, SamplingParams(**GREEDY, bad_words=bad_words), prompt)
        assert word not in changed
        assert pair not in pairwise(changed)
        first = min(answer.index(word), 1 + list(pairwise(answer)).index(pair))
        assert changed[:first] == answer[:first]
        assert changed[first] != answer[first]


@pytest.mark.parametrize("least", [0, 1, 5, 16])
def test_min_tokens_is_exact_c37(llm: LLM, least: int) -> None:
    """Every id ends the request, so that it ends as soon as it may; equal to max_tokens is no error."""
    params = SamplingParams(
        temperature=1.0,
        seed=3,
        max_tokens=16,
        min_tokens=least,
        stop_token_ids=[t for t in range(96) if t % 4],
        logit_bias={t: 60.0 for t in range(96) if t % 4},
    )
    for output in llm.generate(PROMPTS, params):
        answer, reason = output.outputs[0].token_ids, output.outputs[0].finish_reason
        assert all(t % 4 == 0 for t in answer[:least])
        assert (len(answer), reason) == ((16, "length") if least == 16 else (least + 1, "stop"))


def test_allowed_tokens_and_what_forbids_all_of_them(llm: LLM) -> None:
    few = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, allowed_token_ids=[4, 9, 50])
    none = SamplingParams(temperature=1.0, max_tokens=12, allowed_token_ids=[4], bad_words=["w4"])
    plain = SamplingParams(**GREEDY)
    expected = tokens(llm, plain, PROMPTS[2])
    outputs = llm.generate([PROMPTS[1], PROMPTS[1], PROMPTS[2]], [few, none, plain])
    assert set(outputs[0].outputs[0].token_ids) <= {4, 9, 50}
    assert (outputs[1].outputs[0].finish_reason, outputs[1].outputs[0].token_ids) == ("error", [])
    assert outputs[2].outputs[0].token_ids == expected[0]


def test_a_bias_and_a_penalty_take_turns(llm: LLM) -> None:
    """A penalty that is smaller than the bias even at its most, and one that is larger."""
    params = SamplingParams(**GREEDY, logit_bias={11: 200.0}, frequency_penalty=2.0)
    for answer in tokens(llm, params):
        assert answer == [11] * 16
    once = SamplingParams(**GREEDY, logit_bias={11: 200.0}, repetition_penalty=1e4)
    for prompt, answer in zip(PROMPTS, tokens(llm, once), strict=True):
        assert (answer[0] == 11) == (11 not in prompt["prompt_token_ids"])
        assert 11 not in answer[1:6]


def test_logprobs_equal_transformers(llm: LLM, hf: Any) -> None:
    for output in llm.generate(PROMPTS, SamplingParams(**GREEDY, logprobs=3)):
        completion = output.outputs[0]
        assert completion.logprobs is not None
        prompt = output.prompt_token_ids
        expected = logits_of(hf, prompt + completion.token_ids).log_softmax(-1)[len(prompt) - 1 : -1]
        for token, entries, row in zip(completion.token_ids, completion.logprobs, expected, strict=True):
            top = row.topk(3)
            assert list(entries) == top.indices.tolist()
            assert [e.logprob for e in entries.values()] == pytest.approx(top.values.tolist(), abs=1e-4)
            assert [e.rank for e in entries.values()] == [1, 2, 3]
            assert token == next(iter(entries))
        assert completion.cumulative_logprob == pytest.approx(float(expected.amax(-1).sum()), abs=1e-3)


@pytest.mark.parametrize("asked", [0, 2, -1])
def test_prompt_logprobs_equal_transformers_c28(llm: LLM, hf: Any, asked: int) -> None:
    """In chunks of at most 24 tokens, and again when the prompt's blocks are in the prefix cache."""
    tokens(llm, SamplingParams(**GREEDY))
    for _ in range(2):
        params = [SamplingParams(**GREEDY, prompt_logprobs=asked if i != 3 else None) for i in range(len(PROMPTS))]
        for index, output in enumerate(llm.generate(PROMPTS, params)):
            if index == 3:
                assert output.prompt_logprobs is None
                continue
            prompt, found = output.prompt_token_ids, output.prompt_logprobs
            assert found is not None
            assert len(found) == len(prompt)
            assert found[0] is None
            expected = logits_of(hf, prompt).log_softmax(-1)
            for token, entries, row in zip(prompt[1:], found[1:], expected[:-1], strict=True):
                assert entries is not None
                assert entries[token].logprob == pytest.approx(float(row[token]), abs=1e-4)
                top = row.topk(96 if asked < 0 else asked)
                if token not in top.indices:
                    assert entries[token].rank == int((row >= row[token]).sum())
                listed = {t: e.logprob for t, e in entries.items()}
                for likely, value in zip(top.indices.tolist(), top.values.tolist(), strict=True):
                    assert listed[likely] == pytest.approx(value, abs=1e-4)


def test_prompt_logprobs_survive_preemption(tiny_model: str, hf: Any) -> None:
    cache = {"num_blocks": 8, "block_size": 16}
    with engine(tiny_model, cache=cache, scheduler={"max_num_batched_tokens": 24}) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, prompt_logprobs=0, logprobs=0)
        outputs = llm.generate(PROMPTS, params)
        assert llm.stats().num_preemptions > 0
    for output in outputs:
        prompt, answer = output.prompt_token_ids, output.outputs[0]
        expected = logits_of(hf, prompt + answer.token_ids).log_softmax(-1)
        assert output.prompt_logprobs is not None
        assert answer.logprobs is not None
        for at, entries in enumerate([*output.prompt_logprobs[1:], *answer.logprobs]):
            token = (prompt + answer.token_ids)[at + 1]
            assert entries is not None
            assert entries[token].logprob == pytest.approx(float(expected[at, token]), abs=1e-4)


def test_the_modes_of_log_probabilities(tiny_model: str, hf: Any) -> None:
    prompt = PROMPTS[2]["prompt_token_ids"]
    raw = logits_of(hf, prompt)[-1]
    biased = raw.clone()
    biased[11] += 200.0
    for mode, expected in (
        ("raw_logprobs", raw.log_softmax(-1)),
        ("raw_logits", raw),
        ("processed_logprobs", (biased / 0.5).log_softmax(-1)),
        ("processed_logits", biased / 0.5),
    ):
        with engine(tiny_model, sampler={"logprobs_mode": mode}) as llm:
            params = SamplingParams(temperature=0.5, max_tokens=1, logit_bias={11: 200.0}, logprobs=-1)
            [output] = llm.generate(PROMPTS[2], params)
        assert output.outputs[0].token_ids == [11]
        assert output.outputs[0].logprobs is not None
        found = output.outputs[0].logprobs[0]
        assert [found[t].logprob for t in range(96)] == pytest.approx(expected.tolist(), rel=1e-4, abs=2e-3)


def test_ids_that_only_pad_the_vocabulary_are_never_drawn_c39(tiny_model: str, tmp_path: Path) -> None:
    """A tokenizer of 40 tokens before a model of 96."""
    folder = tmp_path / "padded"
    shutil.copytree(tiny_model, folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"] = {token: i for token, i in tokenizer["model"]["vocab"].items() if i < 40}
    file.write_text(json.dumps(tokenizer))
    hot: dict[str, Any] = {"temperature": 5.0, "max_tokens": 16, "ignore_eos": True}
    with engine(str(folder)) as llm:
        drawn = tokens(llm, [SamplingParams(**hot, seed=i) for i in range(5)])
        assert all(token < 40 for answer in drawn for token in answer)
        drawn = tokens(llm, [SamplingParams(**hot, seed=i, logit_bias={90: 99.0}, logprobs=-1) for i in range(5)])
        assert all(token < 40 for answer in drawn for token in answer)
        [output] = llm.generate(PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=[90]))
        assert output.outputs[0].finish_reason == "error"
