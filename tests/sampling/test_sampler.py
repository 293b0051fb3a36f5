"""The sampler: greedy rows, seeds, filters and the law of the draws (C32, C33, C34, C40)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from enginebay.sampling.sampler import SamplingRows, apply_min_p, apply_top_k_top_p, sample
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor


@dataclass(frozen=True)
class Row:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    index: int = 0


def rows_of(rows: list[Row]) -> SamplingRows:
    return SamplingRows(
        temperature=torch.tensor([r.temperature for r in rows], dtype=torch.float32),
        top_p=torch.tensor([r.top_p for r in rows], dtype=torch.float32),
        top_k=torch.tensor([r.top_k for r in rows]),
        min_p=torch.tensor([r.min_p for r in rows], dtype=torch.float32),
        seed=torch.tensor([r.seed for r in rows]),
        output_index=torch.tensor([r.index for r in rows]),
        all_greedy=all(r.temperature == 0 for r in rows),
        any_top_k_or_p=any(r.top_k > 0 or r.top_p < 1 for r in rows),
        any_min_p=any(r.min_p > 0 for r in rows),
    )


def draws(logits: Tensor, count: int, row: Row) -> Tensor:
    """`count` tokens of one request, at output indices 0 to count - 1."""
    rows = rows_of([row] * count)
    rows.output_index = torch.arange(count)
    return sample(logits.expand(count, -1), rows)


def random_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_rows_of_a_mixed_batch_are_the_exact_argmax_c32(dtype: torch.dtype) -> None:
    logits = random_logits(32, 101).to(dtype)
    kept = logits.clone()
    rows = [Row(temperature=0.0 if i % 2 else 1.3, top_k=5 * (i % 3), min_p=0.1 * (i % 2), seed=i) for i in range(32)]
    tokens = sample(logits, rows_of(rows))
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens[1::2], logits[1::2].argmax(-1))
    assert not torch.equal(tokens[::2], logits[::2].argmax(-1))
    assert torch.equal(logits, kept)


@pytest.mark.parametrize("neighbour", [None, Row(seed=4)])
def test_temperature_zero_is_greedy_whatever_the_filters_c33(neighbour: Row | None) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0]]).repeat(50, 1)  # a tie, which a random path would flip
    rows = [Row(temperature=0.0, top_p=0.9, top_k=3, min_p=0.2, seed=i, index=i) for i in range(50)]
    if neighbour is not None:
        rows[-1] = neighbour
    assert sample(logits, rows_of(rows))[:-1].tolist() == [1] * 49


def test_equal_seeds_repeat_and_other_seeds_differ_c34() -> None:
    logits = torch.zeros(1, 1000)
    first = draws(logits, 40, Row(seed=1))
    assert torch.equal(first, draws(logits, 40, Row(seed=1)))
    assert (first != draws(logits, 40, Row(seed=2))).sum() > 30
    assert len(set(first.tolist())) > 30  # nor does one request repeat itself


row_strategy = st.builds(
    Row,
    temperature=st.sampled_from([0.0, 0.2, 1.0, 2.5]),
    top_p=st.sampled_from([0.1, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    min_p=st.sampled_from([0.0, 0.3]),
    seed=st.integers(-(2**63), 2**63 - 1),
    index=st.integers(0, 5000),
)


@settings(max_examples=80, deadline=None)
@given(row=row_strategy, others=st.lists(row_strategy, max_size=5), place=st.integers(0, 5), data=st.integers(0, 999))
def test_a_seeded_row_is_unchanged_by_its_neighbours_c34(row: Row, others: list[Row], place: int, data: int) -> None:
    place = min(place, len(others))
    logits = random_logits(len(others) + 1, 37, data)
    alone = sample(logits[place : place + 1], rows_of([row]))
    batch = sample(logits, rows_of([*others[:place], row, *others[place:]]))
    assert int(batch[place]) == int(alone[0])


def test_a_token_outside_the_top_p_set_never_appears_c40() -> None:
    probability = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])[torch.tensor([3, 0, 4, 1, 2])]
    tokens = draws(probability.log(), 50_000, Row(top_p=0.8, seed=9))
    counts = torch.bincount(tokens, minlength=5)
    kept = torch.tensor([1, 3, 4])  # 0.4, 0.3, and 0.15, which crosses 0.8
    assert int(counts[kept].sum()) == 50_000
    expected = probability[kept] / probability[kept].sum() * 50_000
    assert float(((counts[kept] - expected) ** 2 / expected).sum()) < 13.8  # chi-square, 2 degrees of freedom, 0.999


def test_the_only_token_left_wins_even_with_the_least_noise_c40() -> None:
    """The word of token 1 here rounds to 2^32 in float32: noise of -inf would tie token 1 with the filtered ones."""
    row = Row(top_k=1, seed=120, index=106350)
    assert sample(torch.tensor([[0.0, 9.0, 0.0, 0.0]]), rows_of([row])).tolist() == [1]


def test_the_least_temperature_is_the_argmax() -> None:
    """Dividing by it overflows: the maximum must not tie with others at infinity."""
    logits = torch.tensor([[1.0, 5.0, 3.0, -2.0]])
    for temperature in (1e-30, 1e-38, 1e-44):
        for row in (Row(temperature, seed=3), Row(temperature, seed=3, top_p=0.9, top_k=3, min_p=0.1)):
            assert sample(logits, rows_of([row])).tolist() == [1]


def test_draws_follow_the_softmax() -> None:
    """Chi-square over 20 tokens and 100 000 draws with a fixed seed; 43.8 is the 0.999 quantile for 19 degrees."""
    logits = random_logits(1, 20, 5) / 3
    for temperature in (1.0, 0.7, 2.0):
        counts = torch.bincount(draws(logits, 100_000, Row(temperature, seed=77)), minlength=20)
        expected = (logits[0].double() / temperature).softmax(-1) * 100_000
        assert float(((counts - expected) ** 2 / expected).sum()) < 43.8


def kept(masked: Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero().flatten().tolist() for row in masked]


def test_top_k_keeps_exactly_k_though_tokens_tie() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0], [3.0, 1.0, 2.0, 2.0, 2.0]]).repeat(4, 1)
    top_k = torch.tensor([2, 3, 1, 1, 5, 5, 0, 99])
    masked = apply_top_k_top_p(logits, top_k, torch.ones(8))
    assert [len(row) for row in kept(masked)] == [2, 3, 1, 1, 5, 5, 5, 5]
    assert kept(masked)[1] == [0, 2, 3]
    assert kept(masked)[3] == [0]
    finite = masked.isfinite()
    assert torch.equal(masked[finite], logits[finite])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999), top_k=st.integers(0, 30), top_p=st.floats(2**-6, 1.0, width=32), vocab=st.integers(1, 25)
)
def test_filters_keep_the_smallest_set_of_the_top_k_that_reaches_top_p(
    seed: int, top_k: int, top_p: float, vocab: int
) -> None:
    logits = random_logits(1, vocab, seed)
    masked = apply_top_k_top_p(logits, torch.tensor([top_k]), torch.tensor([top_p]))
    order = logits[0].argsort(descending=True).tolist()[: top_k or vocab]
    probability = logits[0, order].double().softmax(-1).cumsum(-1)
    near = 1e-6  # float32 sums may fall on either side of a border
    least = 1 + int((probability < top_p - near).sum())
    most = 1 + int((probability < top_p + near).sum())
    count = len(kept(masked)[0])
    assert min(least, len(order)) <= count <= min(most, len(order))
    assert kept(masked)[0] == sorted(order[:count])


def test_top_p_applies_within_the_top_k() -> None:
    """0.4 and 0.3 make 0.57 and 0.43 of the top two, so 0.5 needs the first alone; of all five it needs two."""
    logits = torch.tensor([[0.4, 0.3, 0.15, 0.1, 0.05]]).log().repeat(2, 1)
    assert kept(apply_top_k_top_p(logits, torch.tensor([2, 0]), torch.tensor([0.5, 0.5]))) == [[0], [0, 1]]


def test_the_least_top_p_keeps_the_likeliest() -> None:
    logits = random_logits(3, 11)
    masked = apply_top_k_top_p(logits, torch.zeros(3, dtype=torch.int64), torch.tensor([1e-30, 0.0, 1e-45]))
    assert kept(masked) == [[int(i)] for i in logits.argmax(-1)]


def test_min_p_drops_tokens_below_its_share_of_the_likeliest() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.11, 0.09]]).log().repeat(4, 1)
    masked = apply_min_p(logits, torch.tensor([0.0, 0.2, 0.5, 1.0]))
    assert kept(masked) == [[0, 1, 2, 3], [0, 1, 2], [0, 1], [0]]


def test_min_p_never_draws_a_dropped_token() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.11, 0.09]]).log()
    assert set(draws(logits, 20_000, Row(min_p=0.2, seed=1)).tolist()) == {0, 1, 2}


def test_rows_without_filters_are_unchanged_by_rows_with_them() -> None:
    logits = random_logits(2, 9)
    masked = apply_min_p(
        apply_top_k_top_p(logits, torch.tensor([0, 2]), torch.tensor([1.0, 0.5])), torch.tensor([0.0, 0.4])
    )
    assert torch.equal(masked[0], logits[0])
    assert int(masked[1].isfinite().sum()) < 9
