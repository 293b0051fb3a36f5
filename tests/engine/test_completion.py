"""A completion's text against a decoding by brute force, its tokens, and its log-probabilities."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from enginebay.engine.completion import Completion
from enginebay.engine.detokenizer import Detokenizer
from enginebay.interfaces.scheduler import FinishReason, Request, RequestOutputDelta, TokenLogprobs
from enginebay.sampling.params import SamplingParams
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

FAMILY = "👨\u200d👩\u200d👧"
ACCENTED = "e\u0301"
#: tokens of more than one byte: words, joined and torn characters
PIECES = [b"ab", b"bca", "你好".encode(), "你".encode()[1:] + "好".encode()[:2], FAMILY.encode(), "\u0301 ".encode()]
EOS = 256 + len(PIECES)


def make_backend() -> Tokenizer:
    """A byte-level tokenizer whose token i is byte i, or one of the pieces."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(0x100) if b not in printable]
    chars = {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(others)}
    tokens = ["".join(map(chars.__getitem__, piece)) for piece in [*(bytes([b]) for b in range(256)), *PIECES]]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return backend


BACKEND = make_backend()
DETOKENIZER = Detokenizer(BACKEND)


def make_fallback() -> Tokenizer:
    """SentencePiece-like: byte tokens <0x00> to <0xFF> are text only once their run has ended."""
    words = [*(f"<0x{b:02X}>" for b in range(256)), "a", "b", "▁a"]
    backend = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    return backend


FALLBACK = Detokenizer(make_fallback())


def make_request(**params: Any) -> Request:
    made = SamplingParams(**params)
    return Request("0", np.array([ord("q")], dtype=np.int32), made, frozenset({EOS}), max_output_tokens=99, seed=0)


def make_completion(detokenizer: Detokenizer = DETOKENIZER, **params: Any) -> Completion:
    request = make_request(**params)
    text = detokenizer.stream(request.prompt_token_ids.tolist()) if request.params.detokenize else None
    return Completion(0, request, text, frozenset({EOS}), detokenizer.token_text)


def ids(text: str) -> list[int]:
    return list(text.encode())


@dataclass(frozen=True)
class Expected:
    text: str
    num_tokens: int
    stop: str | None


def by_brute_force(
    tokens: Sequence[int], stops: Sequence[str], *, min_tokens: int, include: bool, hidden: bool
) -> Expected:
    """Decode every beginning of `tokens` anew and look at all places; `hidden`: the last token has no text."""
    pieces = [*(bytes([b]) for b in range(256)), *PIECES, b""]
    shown = tokens[:-1] if hidden else tokens
    before = ""
    for n in range(1, len(tokens) + 2):
        final = n > len(tokens)
        data = b"".join(pieces[t] for t in shown[:n])
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(data, final=final)
        num_tokens = min(n, len(tokens))
        found = [
            (start, len(stop), stop)
            for stop in stops
            for start in range(len(text))
            if num_tokens > min_tokens and text.startswith(stop, start) and start + len(stop) > len(before)
        ]
        if found:
            start, length, stop = min(found)
            return Expected(text[: start + length if include else start], num_tokens, stop)
        before = text
    return Expected(before, len(tokens), None)


WORDS = ["a", "b", "c", "你", "好", ACCENTED, FAMILY, "👨", "\u0301", "é"]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=6).map("".join)
TOKENS = st.one_of(
    st.lists(st.integers(0, EOS - 1), max_size=4),
    TEXTS.map(ids),
    st.lists(st.integers(256, EOS - 1), max_size=4),
)
STOPS = st.lists(
    st.text(alphabet=["a", "b", "c", "你", "好", "\u0301", "👨", "\u200d", "\ufffd"], min_size=1, max_size=3),
    min_size=0,
    max_size=3,
)


@given(
    parts=st.lists(TOKENS, max_size=5),
    cuts=st.lists(st.integers(1, 4), max_size=20),
    stops=STOPS,
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
    end=st.sampled_from(["length", "eos"]),
)
def test_text_and_tokens_equal_brute_force_c42_c43_c44(
    parts: list[list[int]], cuts: list[int], stops: list[str], min_tokens: int, include: bool, end: str
) -> None:
    """Over any number of tokens a delta: with CJK, joined emoji, combining marks, torn and invalid bytes."""
    tokens = [t for part in parts for t in part] + ([EOS] if end == "eos" else [])
    expected = by_brute_force(tokens, stops, min_tokens=min_tokens, include=include, hidden=end == "eos")
    completion = make_completion(stop=stops, min_tokens=min_tokens, max_tokens=99, include_stop_str_in_output=include)
    deltas = []
    left = list(tokens)
    while completion.finish_reason is None:
        size = cuts.pop() if cuts else 1
        new, left = left[:size], left[size:]
        last: FinishReason | None = None if left else "stop" if end == "eos" else "length"
        completion.update(RequestOutputDelta("0", new, last, EOS if last == "stop" else None))
        deltas.append(completion.read().delta)
    output = completion.read()
    assert (output.text, output.token_ids) == (expected.text, tokens[: expected.num_tokens])
    assert "".join(deltas) == output.text
    assert output.stop_reason == expected.stop
    stopped = expected.stop is not None or end == "eos"
    assert output.finish_reason == ("stop" if stopped else "length")


def test_what_was_shown_is_never_taken_back_c42() -> None:
    completion = make_completion(stop="DEFGHIJ")
    shown = []
    for char in "ABCDEFGHIJ":
        completion.update(RequestOutputDelta("0", ids(char)))
        shown.append(completion.read().delta)
    assert shown == ["A", "B", "C", *[""] * 7]
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_stop_string_completed_by_held_bytes_counts(reason: FinishReason) -> None:
    """Byte tokens are text only once their run ends, which here is the end of the completion."""
    completion = make_completion(FALLBACK, stop="你")
    completion.update(RequestOutputDelta("0", [256, *"你".encode()]))
    assert completion.finish_reason is None
    end = [256] if reason == "stop" else []
    completion.update(RequestOutputDelta("0", end, reason, 256 if end else None))
    output = completion.read()
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", "你")
    assert output.token_ids == [256, *"你".encode(), *end]


def test_min_tokens_count_for_held_bytes_too() -> None:
    completion = make_completion(FALLBACK, stop="你", min_tokens=4)
    completion.update(RequestOutputDelta("0", [256, *"你".encode()], "length"))
    assert (completion.read().text, completion.read().finish_reason) == ("a你", "length")


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_abort_stays_an_abort_and_shows_no_stop_string(reason: FinishReason) -> None:
    completion = make_completion(FALLBACK, stop=["你", "b!"])
    completion.update(RequestOutputDelta("0", [256, *"你".encode()]))
    completion.finish(reason)
    output = completion.read()
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", reason, None)


def test_what_was_held_back_for_a_stop_string_comes_at_the_end_c42() -> None:
    completion = make_completion(stop="abc")
    completion.update(RequestOutputDelta("0", ids("xab")))
    assert completion.read().text == "x"
    completion.finish("abort")
    assert completion.read().delta == "ab"


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_a_stop_token_has_text_where_stops_are_kept(stop: tuple[str, ...]) -> None:
    """As in vLLM."""
    for keep, text in ((True, "a."), (False, "a")):
        completion = make_completion(stop=stop, stop_token_ids=(ord("."),), include_stop_str_in_output=keep)
        completion.update(RequestOutputDelta("0", ids("a."), "stop", ord(".")))
        output = completion.read()
        assert (output.text, output.token_ids, output.stop_reason) == (text, ids("a."), ord("."))


# --- log-probabilities -----------------------------------------------------------------------------------------------


def scores(tokens: Sequence[int], num_top: int) -> TokenLogprobs:
    """Token t has log-probability -t; the likeliest ones are 0, 1, …"""
    top = [list(range(num_top))] * len(tokens)
    table = np.array([[t, *row] for t, row in zip(tokens, top, strict=True)], dtype=np.int32)
    return TokenLogprobs(table, -table.astype(np.float32), np.array([t + 1 for t in tokens], dtype=np.int32))


def test_each_token_has_its_log_probability_and_the_likeliest_ones() -> None:
    completion = make_completion(logprobs=2)
    completion.update(RequestOutputDelta("0", [97], logprobs=scores([97], 2)))
    completion.update(RequestOutputDelta("0", [1, 98], "length", logprobs=scores([1, 98], 2)))
    output = completion.read()
    assert output.logprobs is not None
    assert [list(entries) for entries in output.logprobs] == [[97, 0, 1], [1, 0], [98, 0, 1]]
    assert [entries[t].rank for entries, t in zip(output.logprobs, [97, 1, 98], strict=True)] == [98, 2, 99]
    assert (output.logprobs[0][0].rank, output.logprobs[0][0].logprob) == (1, 0.0)
    assert output.logprobs[0][97].decoded_token == "a"
    assert output.cumulative_logprob == -(97 + 1 + 98)


def test_logprobs_0_is_the_token_alone_and_none_is_none() -> None:
    completion = make_completion(logprobs=0)
    completion.update(RequestOutputDelta("0", [97], logprobs=scores([97], 0)))
    assert [list(entries) for entries in completion.read().logprobs or []] == [[97]]
    silent = make_completion()
    silent.update(RequestOutputDelta("0", [97]))
    assert (silent.read().logprobs, silent.read().cumulative_logprob) == (None, None)


def test_log_probabilities_are_cut_with_the_tokens() -> None:
    completion = make_completion(stop="b", logprobs=1)
    completion.update(RequestOutputDelta("0", ids("abc"), logprobs=scores(ids("abc"), 1)))
    output = completion.read()
    assert output.token_ids == ids("ab")
    assert [next(iter(entries)) for entries in output.logprobs or []] == ids("ab")
    assert output.cumulative_logprob == -(97 + 98)


def test_what_was_handed_out_does_not_change() -> None:
    completion = make_completion(logprobs=0)
    completion.update(RequestOutputDelta("0", [97], logprobs=scores([97], 0)))
    first = completion.read()
    completion.update(RequestOutputDelta("0", [98], logprobs=scores([98], 0)))
    assert (len(first.token_ids), len(first.logprobs or [])) == (1, 1)
