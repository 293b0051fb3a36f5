"""From arrays to dictionaries, and a prompt's scores that come in stretches."""

from __future__ import annotations

import numpy as np
import pytest
from enginebay.engine.logprobs import PromptScores, by_token
from enginebay.interfaces.scheduler import PromptLogprobs, TokenLogprobs
from hypothesis import given
from hypothesis import strategies as st


def scores(tokens: list[int], num_top: int = 1) -> TokenLogprobs:
    """Token t has log-probability -t and rank t + 1; the likeliest ones are 0, 1, …"""
    table = np.array([[t, *range(num_top)] for t in tokens], dtype=np.int32).reshape(len(tokens), 1 + num_top)
    return TokenLogprobs(table, -table.astype(np.float32), np.array([t + 1 for t in tokens], dtype=np.int32))


def test_a_token_that_stands_there_keeps_its_own_rank() -> None:
    """Among equally likely tokens the list may show it before its rank."""
    tied = TokenLogprobs(
        np.array([[5, 5, 7]], dtype=np.int32), np.array([[-1.0, -1.0, -1.0]], dtype=np.float32), np.array([2])
    )
    [entries] = by_token(tied, None)
    assert {token: entry.rank for token, entry in entries.items()} == {5: 2, 7: 2}
    assert entries[5].decoded_token is None


def test_the_whole_vocabulary_is_there_on_request() -> None:
    [entries] = by_token(scores([3], num_top=10), str)
    assert sorted(entries) == list(range(10))
    assert [entries[t].rank for t in range(10)] == list(range(1, 11))
    assert entries[9].decoded_token == "9"


@given(
    prompt=st.lists(st.integers(2, 50), min_size=1, max_size=12),
    ends=st.lists(st.integers(1, 12), max_size=6),
    restarts=st.lists(st.integers(0, 11), max_size=6),
)
def test_each_position_is_kept_once(prompt: list[int], ends: list[int], restarts: list[int]) -> None:
    """Stretches follow each other; a preemption starts anew, wherever it was."""
    kept = PromptScores(None)
    known = 1
    for i, end in enumerate([*ends, len(prompt)]):
        start = min(1 + restarts[i], known) if i < len(restarts) else known
        end = max(start, min(end, len(prompt)))
        # A second look may differ in the last bits: the first one stays.
        kept.add(PromptLogprobs(start, scores(prompt[start:end])))
        known = max(known, end)
    positions = kept.read()
    assert positions[0] is None
    assert [next(iter(p)) for p in positions[1:] if p is not None] == prompt[1:]


def test_the_first_look_stays() -> None:
    kept = PromptScores(None)
    kept.add(PromptLogprobs(1, scores([5, 6])))
    kept.add(PromptLogprobs(1, scores([8, 9, 7])))
    assert [list(p or {})[:1] for p in kept.read()] == [[], [5], [6], [7]]


def test_a_gap_is_a_fault_of_the_engine() -> None:
    with pytest.raises(RuntimeError, match="from 2 on, but only the first 1 are known"):
        PromptScores(None).add(PromptLogprobs(2, scores([5])))
