"""Stop strings against a search by brute force, over every chunking (C42, C43)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from enginebay.engine.stop_strings import Found, StopStrings
from hypothesis import given, settings
from hypothesis import strategies as st

#: few letters, so that strings overlap themselves and each other
LETTERS = st.text(alphabet="ab", max_size=4)
STOPS = st.lists(st.text(alphabet="ab", min_size=2, max_size=6), min_size=1, max_size=3)


def first_match(text: str, after: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """Start and stop string of the match that wins among those that end beyond `after`."""
    found = [
        (start, len(stop), stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > after
    ]
    return (min(found)[0], min(found)[2]) if found else None


def held(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that is a proper beginning of a stop string."""
    return max(n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n]))


@settings(max_examples=400)
@given(chunks=st.lists(LETTERS, max_size=12), stops=STOPS, include=st.booleans(), num_passed=st.integers(0, 4))
def test_the_first_match_is_found_and_no_more_is_held_than_needed_c42_c43(
    chunks: list[str], stops: list[str], include: bool, num_passed: int
) -> None:
    """`num_passed` chunks may not end the text."""
    stream = StopStrings(stops, include=include)
    text = shown = ""
    for number, chunk in enumerate(chunks):
        before, text = len(text), text + chunk
        may_end = number >= num_passed
        match = first_match(text, before, stops) if may_end else None
        got = stream.push(chunk, may_end=may_end)
        if match is not None:
            start, stop = match
            assert isinstance(got, Found)
            assert got.stop == stop
            assert shown + got.text == text[: start + len(stop) if include else start]
            assert stream.flush() == ""
            return
        assert isinstance(got, str)
        shown += got
        assert shown == text[: len(text) - held(text, stops)]
    assert shown + stream.flush() == text


def test_a_prefix_is_held_until_it_fails_c42() -> None:
    stream = StopStrings(["DEFGHIJ"], include=False)
    assert [stream.push(part, may_end=True) for part in ("ABC", "DEF", "GH")] == ["ABC", "", ""]
    assert stream.push("X", may_end=True) == "DEFGHX"


def test_a_stop_string_amid_a_token_is_cut_c43() -> None:
    assert StopStrings(["lo w"], include=False).push("hello world", may_end=True) == Found("hel", "lo w")


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["c", "bcd"], "abcde", Found("a", "bcd")),  # ends in one token: the earliest start
        (["abc", "ab"], "xabc", Found("x", "ab")),  # one start: the shortest
        (["ab", "abc"], "xabc", Found("x", "ab")),
    ],
)
def test_which_of_several_wins(stops: list[str], text: str, expected: Found) -> None:
    assert StopStrings(stops, include=False).push(text, may_end=True) == expected


def test_a_match_may_begin_in_text_that_could_not_end_it() -> None:
    stream = StopStrings(["aab"], include=True)
    assert stream.push("aabaa", may_end=False) == "aab"
    assert stream.push("b!", may_end=True) == Found("aab", "aab")


def test_strings_that_overlap_themselves_are_found() -> None:
    stream = StopStrings(["aabaaab"], include=False)
    assert [stream.push(c, may_end=True) for c in "aabaab"] == ["", "", "", "", "", "aab"]
    assert [stream.push(c, may_end=True) for c in "aaab"] == ["", "", "", Found("", "aabaaab")]


def test_a_long_stop_string_costs_no_more_a_character() -> None:
    """Comparisons count: a search that starts anew at every character would need the product of the lengths."""
    stop = "a" * 20_000 + "b"
    stream = StopStrings([stop], include=False)
    assert [stream.push("a", may_end=True) for _ in range(20_000)] == [""] * 20_000
    assert stream.push("ac", may_end=True) == "a" * 20_001 + "c"
