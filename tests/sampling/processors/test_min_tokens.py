"""`min_tokens` is exact (C37)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from enginebay.sampling.processors.min_tokens import MinTokens
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

VOCAB = 11
seats = st.fixed_dictionaries(
    {
        "prompt": st.just([1, 2]),
        "output": st.lists(st.integers(0, VOCAB - 1), max_size=6),
        "min_tokens": st.integers(0, 6),
        "stops": st.sets(st.integers(0, VOCAB + 2), max_size=3),
    }
)


@given(seats=st.lists(seats, min_size=1, max_size=6))
def test_stop_ids_are_forbidden_until_there_are_so_many_tokens_c37(
    run: Callable[..., Tensor], seats: list[dict[str, Any]]
) -> None:
    logits = torch.randn(len(seats), VOCAB)
    changed = run(MinTokens, logits, seats)
    for row, seat in enumerate(seats):
        for token in range(VOCAB):
            # Drawing a stop id now would end it with len(output) tokens before that one.
            early = len(seat["output"]) < seat["min_tokens"] and token in seat["stops"]
            assert changed[row, token] == (-torch.inf if early else logits[row, token])
