"""How deltas become outputs: routing, several completions, metrics, what is said of the prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from enginebay.engine.detokenizer import Detokenizer
from enginebay.engine.family import family
from enginebay.engine.output_processor import OutputProcessor
from enginebay.engine.request_state import RequestState
from enginebay.interfaces.scheduler import PromptLogprobs, Request, RequestOutputDelta, TokenLogprobs
from enginebay.sampling.params import SamplingParams
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

EOS = 256


def make_backend() -> Tokenizer:
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return backend


BACKEND = make_backend()


def ids(text: str) -> list[int]:
    return list(BACKEND.encode(text).ids)


def make_request(name: str = "0", **params: Any) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=np.array(ids("q"), dtype=np.int32),
        params=SamplingParams(**params),
        stop_token_ids=frozenset({EOS}),
        max_output_tokens=16,
        seed=0,
    )


@pytest.fixture
def outputs() -> OutputProcessor:
    return OutputProcessor(Detokenizer(BACKEND), (EOS,))


def test_text_and_ids_add_up(outputs: OutputProcessor) -> None:
    state = outputs.add([make_request()], "q", 0.0)
    outputs.process([RequestOutputDelta("0", ids("ab"))])
    first = state.read()
    assert (first.outputs[0].text, first.outputs[0].delta, first.finished) == ("ab", "ab", False)
    outputs.process([RequestOutputDelta("0", ids("c"))])
    outputs.process([RequestOutputDelta("0", ids("d"), finish_reason="length")])
    last = state.read()
    assert (last.outputs[0].text, last.outputs[0].delta, last.finished) == ("abcd", "cd", True)
    assert last.outputs[0].token_ids == ids("abcd")
    assert last.outputs[0].finish_reason == "length"
    assert (last.request_id, last.prompt, last.prompt_token_ids) == ("0", "q", ids("q"))
    assert first.outputs[0].token_ids == ids("ab"), "an output handed out must not change"


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("stop", "ignore_eos", "reason"), [(EOS, False, None), (ids(".")[0], False, ids(".")[0]), (EOS, True, EOS)]
)
def test_a_stop_token_counts_but_is_not_text(
    outputs: OutputProcessor, stop: int, ignore_eos: bool, reason: int | None, skip: bool
) -> None:
    state = outputs.add([make_request(skip_special_tokens=skip, ignore_eos=ignore_eos)], "q", 0.0)
    outputs.process([RequestOutputDelta("0", [*ids("a"), stop], finish_reason="stop", stop_token_id=stop)])
    completion = state.read().outputs[0]
    assert (completion.text, completion.token_ids) == ("a", [*ids("a"), stop])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", reason)


def test_what_was_held_back_comes_at_the_end(outputs: OutputProcessor) -> None:
    """C44: a character that never completes is one U+FFFD, and only at the end."""
    state = outputs.add([make_request()], "q", 0.0)
    outputs.process([RequestOutputDelta("0", ids("a😀")[:-1])])
    assert state.read().outputs[0].delta == "a"
    outputs.process([RequestOutputDelta("0", [], finish_reason="length")])
    assert state.read().outputs[0].delta == "\ufffd"


def test_unread_says_whether_something_came(outputs: OutputProcessor) -> None:
    state = outputs.add([make_request()], "q", 0.0)
    outputs.process([RequestOutputDelta("0", [])])
    assert not state.unread
    outputs.process([RequestOutputDelta("0", ids("a"))])
    assert state.unread
    state.read()
    assert not state.unread


def test_deltas_go_to_their_requests(outputs: OutputProcessor) -> None:
    states = [outputs.add([make_request(name)], "q", 0.0) for name in "xyz"]
    outputs.process([RequestOutputDelta(name, ids(name), finish_reason="length") for name in "zx"])
    assert [s.read().outputs[0].text for s in states] == ["x", "", "z"]
    assert outputs.unfinished == ["y"]


def test_deltas_of_unknown_requests_are_dropped(outputs: OutputProcessor) -> None:
    """C47: a step in flight may still speak of a request that was aborted."""
    state = outputs.add([make_request()], "q", 0.0)
    outputs.process([RequestOutputDelta("0", ids("a"))])
    assert outputs.abort(["0", "unknown"]) == ["0"]
    outputs.process([RequestOutputDelta("0", ids("b")), RequestOutputDelta("0", [], finish_reason="abort")])
    completion = state.read().outputs[0]
    assert (completion.text, completion.finish_reason) == ("a", "abort")
    assert outputs.abort(["0"]) == []
    assert outputs.unfinished == []


def test_an_error_is_handed_on(outputs: OutputProcessor) -> None:
    state = outputs.add([make_request()], "q", 0.0)
    outputs.process([RequestOutputDelta("0", [], finish_reason="error", error="the pool is gone")])
    output = state.read()
    assert (output.error, output.outputs[0].finish_reason, output.finished) == ("the pool is gone", "error", True)


def test_text_is_made_only_where_asked(outputs: OutputProcessor) -> None:
    state = outputs.add([make_request(detokenize=False)], None, 0.0)
    outputs.process([RequestOutputDelta("0", ids("ab"), finish_reason="length")])
    assert (state.read().outputs[0].text, state.read().outputs[0].token_ids) == ("", ids("ab"))


# --- several completions ---------------------------------------------------------------------------------------------


def add_family(outputs: OutputProcessor, n: int, **params: Any) -> RequestState:
    return outputs.add(family(make_request("0", n=n, **params), prefix_caching=True), "q", 0.0)


def texts(state: RequestState) -> list[str]:
    return [c.text for c in state.read().outputs]


def test_completions_come_by_index_in_one_output(outputs: OutputProcessor) -> None:
    state = add_family(outputs, 3)
    outputs.process([RequestOutputDelta("0-2", ids("c")), RequestOutputDelta("0", ids("a"))])
    first = state.read()
    assert [(c.index, c.text, c.delta) for c in first.outputs] == [(0, "a", "a"), (1, "", ""), (2, "c", "c")]
    outputs.process([RequestOutputDelta("0-1", ids("b"), "length")])
    assert state.unread
    assert [(c.text, c.delta) for c in state.read().outputs] == [("a", ""), ("b", "b"), ("c", "")]
    assert not state.finished
    outputs.process([RequestOutputDelta("0", [], "length"), RequestOutputDelta("0-2", ids("!"), "length")])
    last = state.read()
    assert (last.request_id, last.finished) == ("0", True)
    assert [c.finish_reason for c in last.outputs] == ["length"] * 3
    assert outputs.unfinished == []


def test_a_stop_string_ends_one_completion_and_tells_whom_to_stop(outputs: OutputProcessor) -> None:
    state = add_family(outputs, 2, stop="x")
    deltas = [RequestOutputDelta("0", ids("ax")), RequestOutputDelta("0-1", ids("a"))]
    assert outputs.process(deltas) == ["0"]
    later = [
        RequestOutputDelta("0", ids("y")),
        RequestOutputDelta("0-1", ids("b")),
        RequestOutputDelta("0", [], "abort"),
    ]
    assert outputs.process(later) == []
    assert texts(state) == ["a", "ab"]
    assert [c.finish_reason for c in state.read().outputs] == ["stop", None]
    assert outputs.process([RequestOutputDelta("0-1", ids("x"), "length")]) == [], "the engine has ended it already"
    assert [c.stop_reason for c in state.read().outputs] == ["x", "x"]
    assert state.finished


def test_an_abort_ends_what_goes_on_still(outputs: OutputProcessor) -> None:
    state = add_family(outputs, 3)
    outputs.process([RequestOutputDelta("0", ids("a"), "length"), RequestOutputDelta("0-1", ids("b"))])
    assert outputs.abort(["0-1"]) == [], "a completion has no id of its own"
    assert outputs.abort(["0"]) == ["0-1", "0-2"]
    assert [c.finish_reason for c in state.read().outputs] == ["length", "abort", "abort"]
    outputs.process([RequestOutputDelta("0-2", ids("c"))])
    assert texts(state) == ["a", "b", ""]
    assert outputs.unfinished == []


def test_an_error_of_one_completion_leaves_the_others(outputs: OutputProcessor) -> None:
    state = add_family(outputs, 2)
    outputs.process(
        [RequestOutputDelta("0-1", [], "error", error="broken"), RequestOutputDelta("0", ids("a"), "length")]
    )
    output = state.read()
    assert output.error == "broken"
    assert [c.finish_reason for c in output.outputs] == ["length", "error"]


# --- metrics, and what is said of the prompt -------------------------------------------------------------------------


def test_a_step_is_dated_once(outputs: OutputProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([11.0, 12.0, 14.0])
    monkeypatch.setattr("enginebay.engine.output_processor.time.monotonic", lambda: next(clock))
    states = [outputs.add([make_request(name)], "q", 10.0) for name in "xy"]
    outputs.process([RequestOutputDelta("x", ids("a"), first_scheduled=10.5, num_cached_tokens=3)])
    early = states[0].read()
    outputs.process([RequestOutputDelta(name, ids("b")) for name in "xy"])
    outputs.process([RequestOutputDelta(name, [], "length") for name in "xy"])
    metrics = states[0].read().metrics
    assert (metrics.arrival_time, metrics.first_scheduled_time) == (10.0, 10.5)
    assert (metrics.first_token_time, metrics.last_token_time, metrics.finished_time) == (11.0, 12.0, 14.0)
    assert metrics.num_output_tokens == 2
    assert states[0].read().num_cached_tokens == 3
    assert states[1].read().metrics.first_token_time == 12.0
    assert early.metrics.last_token_time == 11.0, "an output handed out must not change"
    assert early.metrics.finished_time is None


def test_a_family_has_the_leaders_hits_and_the_outermost_times(
    outputs: OutputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([1.0, 2.0, 3.0])
    monkeypatch.setattr("enginebay.engine.output_processor.time.monotonic", lambda: next(clock))
    state = add_family(outputs, 2)
    outputs.process([RequestOutputDelta("0", ids("a"), first_scheduled=0.5, num_cached_tokens=0)])
    later = RequestOutputDelta("0-1", ids("bc"), "length", first_scheduled=1.5, num_cached_tokens=16)
    outputs.process([later])
    outputs.process([RequestOutputDelta("0", [], "length")])
    output = state.read()
    metrics = output.metrics
    assert (metrics.first_scheduled_time, metrics.first_token_time, metrics.last_token_time) == (0.5, 1.0, 2.0)
    assert (metrics.finished_time, metrics.num_output_tokens) == (3.0, 2)
    assert output.num_cached_tokens == 0


def test_an_abort_is_dated(outputs: OutputProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginebay.engine.output_processor.time.monotonic", lambda: 5.0)
    state = outputs.add([make_request()], "q", 1.0)
    outputs.abort(["0"])
    metrics = state.read().metrics
    assert (metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time) == (None, None, 5.0)


def prompt_scores(start: int, tokens: list[int]) -> PromptLogprobs:
    table = np.array([[t] for t in tokens], dtype=np.int32)
    return PromptLogprobs(start, TokenLogprobs(table, -table.astype(np.float32), np.ones(len(tokens), dtype=np.int32)))


def test_a_prompts_scores_come_before_its_first_token(outputs: OutputProcessor) -> None:
    state = add_family(outputs, 2, prompt_logprobs=0)
    assert state.read().prompt_logprobs == [None]
    outputs.process([RequestOutputDelta("0", [], prompt_logprobs=prompt_scores(1, [5, 6]))])
    assert not state.unread, "no completion grew"
    outputs.process([RequestOutputDelta("0", ids("a"), prompt_logprobs=prompt_scores(1, [5, 6, 7]))])
    found = state.read().prompt_logprobs
    assert found is not None
    assert [p and list(p) for p in found] == [None, [5], [6], [7]]


def test_scores_are_there_only_where_asked(outputs: OutputProcessor) -> None:
    state = outputs.add([make_request()], "q", 0.0)
    assert state.read().prompt_logprobs is None


def test_tokens_are_decoded_for_log_probabilities_where_text_is_made(outputs: OutputProcessor) -> None:
    [token] = ids("a")
    scored = prompt_scores(0, [token]).positions
    for detokenize, text in ((True, "a"), (False, None)):
        state = outputs.add([make_request(detokenize=detokenize, logprobs=0)], "q", 0.0)
        outputs.process([RequestOutputDelta("0", [token], "length", logprobs=scored)])
        [entries] = state.read().outputs[0].logprobs or []
        assert entries[token].decoded_token == text
