"""How deltas become outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from enginebay.engine.detokenizer import Detokenizer
from enginebay.engine.output_processor import OutputProcessor
from enginebay.interfaces.scheduler import Request, RequestOutputDelta
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
