"""Scores against a plain log-softmax."""

from __future__ import annotations

import math

import pytest
import torch
from enginebay.sampling.logprobs import _smallest_at_border, score
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
        assert top == sorted(range(5), key=lambda t: (-row[t], t))[:width]


@given(
    rows=st.lists(
        st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 2.0]), min_size=40, max_size=40), min_size=1, max_size=4
    ),
    num_top=st.integers(0, 40),
    wider=st.sampled_from([1, 7, 40, -1]),
)
def test_of_equal_tokens_those_with_smaller_ids_whatever_the_width(
    rows: list[list[float]], num_top: int, wider: int
) -> None:
    """A row's likeliest tokens are a prefix of those that a neighbour's larger wish brings along (C34)."""
    logits, tokens = torch.tensor(rows), torch.zeros(len(rows), dtype=torch.int64)
    width = -1 if wider < 0 else min(num_top + wider, 40)
    narrow = score(logits, tokens, num_top, as_logits=True)
    wide = score(logits, tokens, width, as_logits=True)
    alone = score(logits[:1], tokens[:1], num_top, as_logits=True)
    expected = [sorted(range(40), key=lambda t: (-row[t], t))[:num_top] for row in rows]
    assert narrow.token_ids[:, 1:].tolist() == expected
    assert torch.equal(wide.token_ids[:, : 1 + num_top], narrow.token_ids)
    assert torch.equal(wide.values[:, : 1 + num_top], narrow.values)
    assert torch.equal(alone.token_ids[0], narrow.token_ids[0])


def test_the_border_found_without_a_look_at_the_device() -> None:
    """The way of accelerators, which resolve every row, agrees with that of the host, which resolves tied ones."""
    values = torch.randint(0, 4, (20, 30), generator=torch.Generator().manual_seed(1)).float()
    for num_top in (1, 3, 9, 29):
        top = values.topk(num_top, dim=1)
        found = _smallest_at_border(values, top.indices, top.values).sort(dim=1).values
        expected = values.sort(dim=1, descending=True, stable=True).indices[:, :num_top].sort(dim=1).values
        assert torch.equal(found, expected)


def test_rows_of_no_number_name_tokens_of_the_vocabulary() -> None:
    found = score(torch.full((2, 6), torch.nan), torch.tensor([-1, 2]), 3, as_logits=False)
    assert ((found.token_ids[:, 1:] >= 0) & (found.token_ids[:, 1:] < 6)).all()
    nan = torch.full((1, 6), torch.nan)
    assert (_smallest_at_border(nan, torch.tensor([[0, 1]]), nan[:, :2]) < 6).all()


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
