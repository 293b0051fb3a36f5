"""`bad_words` against a plain account."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from enginebay.sampling.processors.bad_words import BadWords
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

VOCAB = 4  # few tokens, so that sequences meet
tokens = st.integers(0, VOCAB - 1)
seats = st.fixed_dictionaries(
    {
        "prompt": st.lists(tokens, min_size=1, max_size=6),
        "output": st.lists(tokens, max_size=8),
        "words": st.lists(st.lists(st.integers(0, VOCAB), min_size=1, max_size=5).map(tuple), max_size=6),
    }
)


def forbidden(seat: dict[str, Any]) -> set[int]:
    output, found = seat["output"], set()
    for word in seat["words"]:
        before = list(word[:-1])
        if len(before) <= len(output) and output[len(output) - len(before) :] == before:
            found.add(word[-1])
    return found


@given(seats=st.lists(seats, min_size=1, max_size=6))
def test_the_token_that_would_complete_a_sequence_is_forbidden(
    run: Callable[..., Tensor], seats: list[dict[str, Any]]
) -> None:
    logits = torch.randn(len(seats), VOCAB)
    changed = run(BadWords, logits, seats)
    for row, seat in enumerate(seats):
        for token in range(VOCAB):
            assert changed[row, token] == (-torch.inf if token in forbidden(seat) else logits[row, token])


def test_the_prompt_does_not_count(run: Callable[..., Tensor]) -> None:
    logits = torch.zeros(3, VOCAB)
    seats = [
        {"prompt": [1, 2], "output": [], "words": [(1, 2, 3)]},
        {"prompt": [1], "output": [2], "words": [(1, 2, 3), (2, 0)]},
        {"prompt": [0], "output": [1, 2], "words": [(1, 2, 3), (0, 3), (3,)]},
    ]
    assert run(BadWords, logits, seats).isinf().tolist() == [
        [False] * 4,
        [True, False, False, False],
        [False, False, False, True],
    ]
