"""`SamplingParams`: every range, and names that are not taken (C33, C41)."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest
from enginebay.errors import RequestError
from enginebay.sampling.params import SamplingParams

FLOAT32_MAX = 3.4028234663852886e38


def test_defaults_filter_nothing_and_draw_c41() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert params.seed is None
    assert not params.greedy


def test_temperature_zero_is_greedy_whatever_the_filters_c33() -> None:
    assert SamplingParams(temperature=0.0, top_p=0.9, top_k=40, min_p=0.1, seed=3).greedy
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-9).greedy


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (0, 0.0, 1e-30, 2, FLOAT32_MAX)),
        ("top_p", (1e-9, 0.5, 1, 1.0)),
        ("min_p", (0, 0.0, 0.5, 1, 1.0)),
        ("top_k", (-1, 0, 1, 2**31 - 1)),
        ("max_tokens", (1, 10**9)),
        ("seed", (None, 0, 2**64 - 1)),
        ("stop_token_ids", ((), (0,), (1, 2))),
        ("ignore_eos", (True, False)),
        ("skip_special_tokens", (True, False)),
        ("detokenize", (True, False)),
    ],
)
def test_values_in_range_are_taken(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (-1e-9, -1, math.nan, math.inf, -math.inf, 1e300, 10**400, "1", None, True, 1j)),
        ("top_p", (0, 0.0, -0.1, 1.0001, math.nan, math.inf, 10**400, "0.9", None, True)),
        ("min_p", (-1e-9, 1.0001, math.nan, math.inf, "0", None, False)),
        ("top_k", (-2, 2**31, 2**70, 1.0, math.nan, "5", None, True)),
        ("max_tokens", (0, -1, 1.5, math.nan, "16", True)),
        ("seed", (-1, 2**64, 1.0, math.nan, "7", True)),
        ("stop_token_ids", ((-1,), (1, 2.0), ("2",), (True,), (None,), "ab", 5)),
        ("ignore_eos", (0, 1, None, "true")),
        ("skip_special_tokens", (0, 1, None, "true")),
        ("n", (0, -1, True, 1.0, 5000)),
        ("presence_penalty", (-2.1, 2.1, math.nan, "1", True)),
        ("frequency_penalty", (-2.1, 2.1, math.nan, None)),
        ("repetition_penalty", (0, 0.0, 1e-46, -1.0, math.inf, math.nan, None)),
        ("min_tokens", (-1, 1.0, None, True)),
        ("logprobs", (-2, 1.5, True, "5")),
        ("prompt_logprobs", (-2, 1.5, True, "5")),
        ("logit_bias", ({-1: 1.0}, {1.5: 1.0}, {"1": 1.0}, {1: math.nan}, {1: math.inf}, {1: "x"}, [1])),
        ("allowed_token_ids", ((), (-1,), (1.5,), "ab", {1: 2})),
        ("bad_words", ((1,), ("",), 5, b"x")),
        ("stop", ((1,), ("",), 5, b"x", bytearray(b"x"))),
        ("include_stop_str_in_output", (0, None)),
        ("extra_args", (1, {1: {}}, {"a": 1})),
        ("detokenize", (0, 1, None, "true")),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{name: value})


def test_the_message_says_what_is_allowed() -> None:
    with pytest.raises(RequestError, match=r"temperature must be at least 0 and finite, not -1"):
        SamplingParams(temperature=-1)
    with pytest.raises(RequestError, match=r"min_p must be between 0 and 1, not 2"):
        SamplingParams(min_p=2)
    with pytest.raises(RequestError, match=r"top_p must be above 0 .*use temperature=0"):
        SamplingParams(top_p=0.0)
    with pytest.raises(RequestError, match=r"max_tokens must be at least 1, not 0"):
        SamplingParams(max_tokens=0)


def test_stop_token_ids_of_a_list_become_a_tuple() -> None:
    given: Any = [5, 6]
    params = SamplingParams(stop_token_ids=given)
    assert params.stop_token_ids == (5, 6)
    assert hash(params) == hash(SamplingParams(stop_token_ids=(5, 6)))


@pytest.mark.parametrize(
    ("name", "near"), [("temprature", "temperature"), ("topp", "top_p"), ("max_token", "max_tokens")]
)
def test_an_unknown_name_gets_a_suggestion(name: str, near: str) -> None:
    with pytest.raises(RequestError, match=rf"unknown sampling parameter '{name}'; did you mean {near}\?"):
        SamplingParams(**dict[str, Any]({name: 1}))


def test_an_unknown_name_without_a_neighbour_lists_the_known() -> None:
    with pytest.raises(RequestError, match=r"'zzzz'; known: n, temperature, top_p"):
        SamplingParams(**dict[str, Any](zzzz=1))


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("best_of", "set n"),
        ("priority", "argument of generate"),
        ("logits_processors", "sampler.processors"),
        ("structured_outputs", "not in this version"),
    ],
)
def test_vllm_names_that_are_no_parameters_here_say_what_to_do_instead(name: str, instead: str) -> None:
    """C6."""
    with pytest.raises(RequestError, match=rf"^{name} is not a sampling parameter of this version: .*{instead}"):
        SamplingParams(**dict[str, Any]({name: 1}))


def test_texts_may_be_one_or_several_and_empty_ones_are_refused() -> None:
    one: Any = "END"
    several: Any = ["a", "b"]
    assert SamplingParams(stop=one, bad_words=several).stop == ("END",)
    assert SamplingParams(stop=one, bad_words=several).bad_words == ("a", "b")
    with pytest.raises(RequestError, match="stop must hold texts of at least one character"):
        SamplingParams(stop=("a", ""))
    with pytest.raises(RequestError, match="leave detokenize at true"):
        SamplingParams(stop=("a",), detokenize=False)


def test_c37_min_tokens_may_equal_max_tokens_but_not_exceed_it() -> None:
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    assert SamplingParams(min_tokens=400, max_tokens=None).max_tokens is None
    with pytest.raises(RequestError, match="min_tokens=5 must not exceed max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_it_survives_copying() -> None:
    params = SamplingParams(temperature=0.5, logit_bias={3: 1.5}, extra_args={"x": {"y": 1}})
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert dataclasses.replace(params, n=2).n == 2


def test_none_stands_for_nothing_where_vllm_has_it_so() -> None:
    nothing: Any = None
    params = SamplingParams(stop_token_ids=nothing, logit_bias=nothing, extra_args=nothing, stop=nothing)
    assert params == SamplingParams()


def test_numpy_scalars_become_pythons() -> None:
    params = SamplingParams(temperature=np.float32(0.5), seed=np.int64(3), ignore_eos=np.bool_(True), n=np.int32(2))  # type: ignore[arg-type]
    assert params == SamplingParams(temperature=0.5, seed=3, ignore_eos=True, n=2)
    assert [type(v) for v in (params.temperature, params.seed, params.ignore_eos)] == [float, int, bool]
    with pytest.raises(RequestError, match="seed must be an integer"):
        SamplingParams(seed=np.array([3]))  # type: ignore[arg-type]
