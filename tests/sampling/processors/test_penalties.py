"""Penalties against plain accounts, and transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from enginebay.sampling.processors.penalties import Penalties
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

VOCAB = 7
tokens = st.integers(0, VOCAB - 1)
seats = st.fixed_dictionaries(
    {
        # A prompt may hold ids that only pad the model's vocabulary.
        "prompt": st.lists(st.integers(0, VOCAB + 2), min_size=1, max_size=8),
        "output": st.lists(tokens, max_size=12),
        "repetition_penalty": st.sampled_from([1.0, 0.5, 1.3, 4.0]),
        "frequency_penalty": st.sampled_from([0.0, -0.7, 1.1]),
        "presence_penalty": st.sampled_from([0.0, -2.0, 0.3]),
    }
)


def reference(logits: np.ndarray, seat: dict[str, Any]) -> np.ndarray:
    """One row, token by token, in float32."""
    changed = logits.copy()
    for token in range(VOCAB):
        count = seat["output"].count(token)
        value, factor = changed[token], np.float32(seat["repetition_penalty"])
        if count or token in seat["prompt"]:
            value = value / factor if value > 0 else value * factor
        value = value - np.float32(seat["frequency_penalty"]) * np.float32(count)
        changed[token] = value - np.float32(seat["presence_penalty"]) * np.float32(count > 0)
    return changed


@given(seats=st.lists(seats, min_size=1, max_size=6))
def test_rows_equal_the_account_bit_by_bit(run: Callable[..., Tensor], seats: list[dict[str, Any]]) -> None:
    logits = torch.randn(len(seats), VOCAB) * 4
    changed = run(Penalties, logits, seats).numpy()
    for row, seat in enumerate(seats):
        assert np.array_equal(changed[row], reference(logits[row].numpy(), seat))


@pytest.mark.parametrize("penalty", [0.7, 1.2, 5.0])
def test_repetition_equals_transformers(run: Callable[..., Tensor], penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(1, VOCAB) * 4
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[1, 3, 3, 6, 0, 1]]), logits.clone())
    ours = run(Penalties, logits, [{"prompt": [1, 3, 3], "output": [6, 0, 1], "repetition_penalty": penalty}])
    assert torch.equal(ours, theirs)


@given(
    logits=st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=VOCAB, max_size=VOCAB),
    penalty=st.sampled_from([2.0**-149, 1e-38, 0.5, 3.0, 3e38]),
    forbidden=st.sets(tokens, max_size=3),
)
def test_no_penalty_overflows(
    run: Callable[..., Tensor], logits: list[float], penalty: float, forbidden: set[int]
) -> None:
    """What was allowed stays finite, so that it can be drawn and scored; what was forbidden stays forbidden."""
    given_logits = torch.tensor([logits])
    given_logits[0, list(forbidden)] = -torch.inf
    seat = {"prompt": [0, 1, 2], "output": [3, 4, 4], "repetition_penalty": penalty, "frequency_penalty": -2.0}
    changed = run(Penalties, given_logits.clone(), [seat])[0]
    assert changed.isfinite().tolist() == [token not in forbidden for token in range(VOCAB)]
    assert changed[list(forbidden)].isneginf().all()


def test_a_forbidden_token_stays_forbidden(run: Callable[..., Tensor]) -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    seat = {
        "prompt": [1],
        "output": [2],
        "repetition_penalty": 0.5,
        "frequency_penalty": -2.0,
        "presence_penalty": -2.0,
    }
    assert run(Penalties, logits, [seat]).isneginf().all()
