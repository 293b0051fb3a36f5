"""`allowed_token_ids` against a plain account."""

from __future__ import annotations

from collections.abc import Callable

import torch
from enginebay.sampling.processors.allowed import AllowedTokens
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

VOCAB = 11


@given(wishes=st.lists(st.none() | st.lists(st.integers(0, VOCAB + 3), min_size=1), min_size=1, max_size=6))
def test_nothing_else_is_left(run: Callable[..., Tensor], wishes: list[list[int] | None]) -> None:
    """Ids from the vocabulary's end on only pad the model's: they cannot be drawn either."""
    logits = torch.randn(len(wishes), VOCAB)
    changed = run(AllowedTokens, logits, [{"prompt": [1], "output": [], "allowed_token_ids": w} for w in wishes])
    for row, wish in enumerate(wishes):
        for token in range(VOCAB):
            kept = wish is None or token in wish
            assert changed[row, token] == (logits[row, token] if kept else -torch.inf)
