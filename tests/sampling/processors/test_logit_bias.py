"""`logit_bias` against a plain account."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from enginebay.sampling.processors.logit_bias import LogitBias
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

VOCAB = 11
biases = st.dictionaries(st.integers(0, VOCAB + 3), st.floats(-100, 100, width=32))


@given(wishes=st.lists(biases, min_size=1, max_size=6))
def test_the_sum_and_nothing_else_changes(run: Callable[..., Tensor], wishes: list[dict[int, float]]) -> None:
    logits = torch.randn(len(wishes), VOCAB)
    logits[:, 3] = -torch.inf  # forbidden, and stays it
    changed = run(LogitBias, logits, [{"prompt": [1], "output": [], "logit_bias": w} for w in wishes])
    expected = logits.numpy().copy()
    for row, wish in enumerate(wishes):
        for token, bias in wish.items():
            if token < VOCAB:
                expected[row, token] += np.float32(bias)
    assert np.array_equal(changed.numpy(), expected)
