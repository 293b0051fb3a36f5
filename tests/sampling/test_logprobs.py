"""Scores against a plain log-softmax."""

from __future__ import annotations

import math

import pytest
import torch
from enginebay.sampling.logprobs import Scores, score
from hypothesis import given
from hypothesis import strategies as st


@given(
    rows=st.lists(st.lists(st.sampled_from([-2.0, 0.0, 0.5, 3.0]), min_size=5, max_size=5), min_size=1, max_size=4),
    num_top=st.sampled_from([-1, 0, 1, 3, 5]),
    token=st.integers(0, 4),
)
def test_scores_equal_a_plain_log_softmax(rows: list[list[float]], num_top: int, token: int) -> None:
    """Many ties: a rank counts the tokens that are at least as likely."""
    found = score(torch.tensor(rows), torch.full((len(rows),), token), num_top, as_logits=False).to_host()
    width = 5 if num_top < 0 else num_top
    assert found.token_ids.shape == found.logprobs.shape == (len(rows), 1 + width)
    for i, row in enumerate(rows):
        total = math.log(sum(math.exp(x) for x in row))
        assert found.token_ids[i, 0] == token
        assert found.ranks[i] == sum(x >= row[token] for x in row)
        expected = [row[token] - total, *(x - total for x in sorted(row, reverse=True)[:width])]
        assert found.logprobs[i].tolist() == pytest.approx(expected, abs=1e-5)
        top = found.token_ids[i, 1:].tolist()
        assert len(set(top)) == width
        assert [row[t] for t in top] == sorted(row, reverse=True)[:width]


def test_logits_are_returned_as_they_are() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]], dtype=torch.bfloat16)
    found = score(logits, torch.tensor([0]), 2, as_logits=True)
    assert found.values.tolist() == [[1.0, 3.0, 2.0]]
    assert found.token_ids.tolist() == [[0, 1, 2]]
    assert found.ranks.tolist() == [3]


@pytest.mark.parametrize("token", [-1, 3])
def test_a_token_that_is_none_is_impossible(token: int) -> None:
    found = score(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([token]), 1, as_logits=False)
    assert found.token_ids.tolist() == [[token, 1]]
    assert found.values[0, 0] == -torch.inf
    assert found.ranks.tolist() == [3]


def test_parts_join_in_order() -> None:
    logits, tokens = torch.randn(5, 9), torch.arange(5)
    parts = [score(logits[a:b], tokens[a:b], 2, as_logits=False) for a, b in ((0, 2), (2, 5))]
    joined, whole = Scores.join(parts), score(logits, tokens, 2, as_logits=False)
    assert torch.equal(joined.token_ids, whole.token_ids)
    assert torch.equal(joined.values, whole.values)
    assert torch.equal(joined.ranks, whole.ranks)
