"""The generator: Philox4x32-10 against Random123's known answers, and the Gumbel noise made of it."""

from __future__ import annotations

import math

import pytest
import torch
from enginebay.sampling.random import gumbel, philox4x32
from hypothesis import given, settings
from hypothesis import strategies as st

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    assert tuple(int(word) for word in philox4x32((c0, c1, c2, c3), (k0, k1))) == answer


def seeds(*values: int) -> torch.Tensor:
    return torch.tensor([v - 2**64 if v >= 2**63 else v for v in values])


def test_counter_and_key_layout() -> None:
    """Token t of output i under seed s reads word t % 4 of the block with counter (t // 4, i, 0, 0) and key s."""
    seed, index, token = 0x299F31D0A4093822, 7, 4 * 5 + 2
    zero = torch.tensor([0])
    words = philox4x32(
        (torch.tensor([5]), torch.tensor([index]), zero, zero), (torch.tensor([0xA4093822]), torch.tensor([0x299F31D0]))
    )
    expected = -math.log(-math.log1p(-(int(words[2]) + 0.5) / 2**32))
    assert float(gumbel(seeds(seed), torch.tensor([index]), 32)[0, token]) == pytest.approx(expected, rel=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=6),
    vocab=st.integers(1, 67),
)
def test_noise_of_a_row_is_independent_of_the_batch(rows: list[tuple[int, int]], vocab: int) -> None:
    together = gumbel(seeds(*(s for s, _ in rows)), torch.tensor([i for _, i in rows]), vocab)
    assert together.shape == (len(rows), vocab)
    assert together.dtype == torch.float32
    assert together.isfinite().all()
    for row, (seed, index) in enumerate(rows):
        assert torch.equal(together[row], gumbel(seeds(seed), torch.tensor([index]), vocab)[0])


def test_noise_of_a_token_is_independent_of_the_vocabulary() -> None:
    wide = gumbel(seeds(11), torch.tensor([3]), 64)
    for vocab in (1, 2, 3, 4, 5, 63):
        assert torch.equal(gumbel(seeds(11), torch.tensor([3]), vocab), wide[:, :vocab])


def test_every_bit_of_the_seed_and_the_index_matter() -> None:
    values = [0, *(1 << bit for bit in range(64))]
    by_seed = gumbel(seeds(*values), torch.zeros(65, dtype=torch.int64), 8)
    assert len({tuple(row) for row in by_seed.tolist()}) == 65
    by_index = gumbel(seeds(*[5] * 100), torch.arange(100), 8)
    assert len({tuple(row) for row in by_index.tolist()}) == 100


def test_noise_is_standard_gumbel() -> None:
    """Mean, variance and the Kolmogorov distance of 2^18 values against the law exp(-exp(-x))."""
    sample = gumbel(torch.arange(64), torch.arange(64) % 5, 4096).double().flatten().sort().values
    n = len(sample)
    assert float(sample.mean()) == pytest.approx(0.5772156649, abs=0.015)
    assert float(sample.var()) == pytest.approx(math.pi**2 / 6, abs=0.04)
    law = (-(-sample).exp()).exp()
    rank = torch.arange(n, dtype=torch.float64)
    distance = torch.maximum((law - rank / n).abs(), (law - (rank + 1) / n).abs()).max()
    assert float(distance) < 1.95 / math.sqrt(n)  # passes with probability 0.999; the seeds are fixed
