"""What an engine refuses of parameters that are sound in themselves; each is that request's error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from enginebay.engine.request_checks import RequestChecks, processors_of
from enginebay.errors import RequestError
from enginebay.plugins.records import ExecutorRecord, LogitsProcessorRecord
from enginebay.plugins.selection import Selection
from enginebay.sampling.params import SamplingParams
from pydantic import BaseModel, ConfigDict, Field

VOCAB = 100
EOS = 2


class Wish(BaseModel):
    model_config = ConfigDict(extra="forbid")

    enabled: bool
    strength: float = Field(default=1.0, ge=0)


def never(context: object) -> object:
    raise AssertionError("a check makes no plugin")


def record(name: str, **values: Any) -> LogitsProcessorRecord:
    return LogitsProcessorRecord(name=name, summary="changes something", factory=never, api_version=0, **values)


PROCESSORS = {"only_even": record("only_even", request_options=Wish), "mute": record("mute")}


def make_checks(*, has_tokenizer: bool = True) -> RequestChecks:
    return RequestChecks(vocab_size=VOCAB, has_tokenizer=has_tokenizer, processors=PROCESSORS)


def check(checks: RequestChecks | None = None, room: int = 16, **params: Any) -> None:
    made = SamplingParams(**params)
    (checks or make_checks()).check(made, frozenset({EOS, *made.stop_token_ids}), room)


def test_a_processor_is_told_what_its_model_makes_of_the_words() -> None:
    said = SamplingParams(extra_args={"only_even": {"enabled": "no"}, "mute": {}}, seed=3)
    told = make_checks().check(said, frozenset(), 16)
    assert told.extra_args == {"only_even": {"enabled": False, "strength": 1.0}, "mute": {}}
    assert said.extra_args["only_even"] == {"enabled": "no"}
    assert told.seed == 3
    plain = SamplingParams()
    assert make_checks().check(plain, frozenset(), 16) is plain


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"logit_bias": {0: 1.0, VOCAB - 1: -1.0}},
        {"allowed_token_ids": (0, VOCAB - 1)},
        {"stop_token_ids": (VOCAB - 1,)},
        {"logprobs": VOCAB, "prompt_logprobs": -1},
        {"min_tokens": 16},
        {"min_tokens": 1, "allowed_token_ids": (EOS, 3)},
        {"allowed_token_ids": (EOS,)},
        {"extra_args": {"only_even": {"enabled": True}, "mute": {}}},
        {"stop": ["你", "\u0301"]},
    ],
)
def test_what_the_engine_can_do_passes(params: dict[str, Any]) -> None:
    check(**params)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias holds 100; the vocabulary is 0 to 99"),  # C38
        ({"logit_bias": {2**40: 1.0}}, "logit_bias holds 1099511627776"),
        ({"allowed_token_ids": (1, VOCAB)}, "allowed_token_ids holds 100"),
        ({"stop_token_ids": (VOCAB,)}, "stop_token_ids holds 100"),
        ({"logprobs": VOCAB + 1}, "logprobs=101 exceeds the vocabulary of 100; -1 asks for all"),
        ({"prompt_logprobs": VOCAB + 1}, "prompt_logprobs=101"),
        ({"max_tokens": None, "min_tokens": 17}, "min_tokens=17 cannot be reached.* 16 new tokens"),
        ({"min_tokens": 1, "allowed_token_ids": (EOS,)}, "nothing but ids that end.*min_tokens=1"),
        ({"min_tokens": 1, "allowed_token_ids": (EOS, 5), "stop_token_ids": (5,)}, "nothing but ids that end"),
        ({"stop": ["\ud800"]}, "stop string is not valid Unicode at character 0"),
        ({"extra_args": {"only_even": {"enabld": True}}}, r"extra_args\.only_even\.enabld: .*did you mean.*enabled"),
        ({"extra_args": {"only_even": {}}}, r"extra_args\.only_even\.enabled: missing"),
        ({"extra_args": {"only_even": {"enabled": 1, "strength": -1}}}, r"extra_args\.only_even\.strength"),
        ({"extra_args": {"mute": {"now": 1}}}, r"extra_args\.mute\.now: unknown key; it takes no keys"),
        ({"extra_args": {"only_evn": {}}}, r"extra_args\.only_evn: no such.*; did you mean only_even\?"),
        ({"extra_args": {"x": {}}}, "sampler.processors names mute, only_even"),
    ],
)
def test_what_it_cannot_do_is_refused_c6_c38(params: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        check(**params)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({}, "detokenize=False"),
        ({"stop": "x"}, "detokenize=False"),
        ({"bad_words": "x", "detokenize": False}, "bad_words cannot be tokenised"),
    ],
)
def test_texts_need_a_tokenizer(params: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=f"no tokenizer.*{says}"):
        check(make_checks(has_tokenizer=False), **params)


def test_the_processors_that_run_are_the_sampler_bays() -> None:
    executor = ExecutorRecord(name="uni", summary="runs here", factory=never, api_version=0)
    chosen = [PROCESSORS["mute"], executor, None]
    selections = [
        Selection(kind=r.kind if r else "quant", wanted="auto", source="auto", chosen=r, identity=None) for r in chosen
    ]
    assert processors_of(selections) == {"mute": PROCESSORS["mute"]}


# --- bad words -------------------------------------------------------------------------------------------------------


def encoder(table: dict[str, list[int]]) -> Callable[[str], list[int]]:
    return lambda text: table[text]


@pytest.mark.parametrize(
    ("words", "table", "expected"),
    [
        (["cat"], {"cat": [5], " cat": [6]}, [(5,), (6,)]),  # another token behind a space
        (["cat"], {"cat": [5, 7], " cat": [6]}, [(5, 7), (6,)]),
        (["cat"], {"cat": [5], " cat": [1, 5]}, [(5,)]),  # the space is a token of its own
        (["cat"], {"cat": [5], " cat": [5]}, [(5,)]),  # the tokenizer puts a space before every text
        ([" cat"], {"cat": [5], " cat": [6]}, [(5,), (6,)]),
        (["\n"], {"\n": [9], " \n": [10]}, [(9,), (10,)]),
        ([" "], {" ": [1]}, [(1,)]),
        (["a", "b"], {"a": [5], " a": [6], "b": [5], " b": [6]}, [(5,), (6,)]),
        (["a"], {"a": [5], " a": [VOCAB, 5, 3]}, [(5,)]),  # the model has no such token
    ],
)
def test_bad_words_are_kept_out_with_and_without_a_space(
    words: list[str], table: dict[str, list[int]], expected: list[tuple[int, ...]]
) -> None:
    assert list(make_checks().bad_words(words, encoder(table))) == expected


def test_a_bad_word_without_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="has no tokens"):
        make_checks().bad_words(["\u200b"], lambda text: [])
    with pytest.raises(RequestError, match="bad word is not valid Unicode"):
        make_checks().bad_words(["\ud800"], lambda text: [1])
