"""The compiled prefill attention against float64, and its law: a query's bits depend on its own tokens only."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from enginebay.kernels.cpu.prefill import prefill_attention, prefills
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytestmark = pytest.mark.skipif(
    not prefills("cpu", torch.bfloat16, 64), reason="this processor has no avx512_bf16, or there is no compiler"
)
HEADS, KV_HEADS, BLOCK = 6, 2, 16


@dataclass(frozen=True)
class Prompts:
    """Whole prompts in a cache, every row's blocks scattered, free memory NaN."""

    query: Tensor  # [T, H, D]: all tokens of all prompts
    cache: Tensor
    table: Tensor
    lengths: tuple[int, ...]

    def start(self, row: int) -> int:
        return sum(self.lengths[:row])


def prompts(lengths: tuple[int, ...], head_dim: int = 64, seed: int = 0) -> Prompts:
    generator = torch.Generator().manual_seed(seed)
    columns = -(-max(lengths) // BLOCK)
    order = 1 + torch.randperm(len(lengths) * columns, generator=generator)
    table = order.view(len(lengths), columns).to(torch.int32)
    cache = torch.full((1 + len(order), 2, BLOCK, KV_HEADS, head_dim), torch.nan).bfloat16()
    for row, length in enumerate(lengths):
        for pos in range(length):
            kv = torch.randn(2, KV_HEADS, head_dim, generator=generator)
            cache[int(table[row, pos // BLOCK]), :, pos % BLOCK] = kv.bfloat16()
    query = torch.randn(sum(lengths), HEADS, head_dim, generator=generator).bfloat16()
    return Prompts(query, cache, table, lengths)


def run(
    made: Prompts, parts: list[tuple[int, int, int]], *, window: int | None = None, cap: float | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Output and lse of ``(row, first, stop)`` tokens, in one call."""
    spans = [slice(made.start(row) + first, made.start(row) + stop) for row, first, stop in parts]
    query = torch.cat([made.query[span] for span in spans])
    sizes = [stop - first for _, first, stop in parts]
    starts = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
    lens = torch.tensor([stop for _, _, stop in parts], dtype=torch.int32)
    out, lse = torch.empty_like(query), torch.empty(query.shape[:2])
    table = made.table[[row for row, _, _ in parts]]
    prefill_attention(query, made.cache, table, starts, lens, out, scale=0.125, window=window, soft_cap=cap, lse=lse)
    return list(out.split(sizes)), list(lse.split(sizes))  # type: ignore[no-untyped-call]


def reference(made: Prompts, row: int, window: int | None, cap: float | None) -> tuple[Tensor, Tensor]:
    length = made.lengths[row]
    where = torch.arange(length)
    kv = made.cache[made.table[row].long()[where // BLOCK], :, where % BLOCK].double()
    k, v = kv.repeat_interleave(HEADS // KV_HEADS, 2).unbind(1)
    query = made.query[made.start(row) : made.start(row) + length].double()
    scores = torch.einsum("qhd,khd->hqk", query, k) * 0.125
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    hidden = where[None] > where[:, None]
    if window is not None:
        hidden |= where[None] <= where[:, None] - window
    scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1).T


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [None, 1, 24, 70])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_equals_float64(head_dim: int, window: int | None, cap: float | None) -> None:
    """Lengths around tiles of 6 query heads, panels of 16 keys, strips of 64 keys and pieces of 64 queries."""
    made = prompts((1, 2, 15, 63, 64, 65, 130), head_dim)
    outs, lses = run(made, [(row, 0, length) for row, length in enumerate(made.lengths)], window=window, cap=cap)
    for row, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        wanted, wanted_lse = reference(made, row, window, cap)
        torch.testing.assert_close(out.double(), wanted, rtol=4e-3, atol=4e-3)  # one rounding to bfloat16
        torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)


@given(
    cuts=st.lists(st.integers(1, 199), max_size=6),
    window=st.sampled_from([None, 1, 30, 64, 100]),
    seed=st.integers(0, 9),
)
def test_bits_do_not_depend_on_chunks_company_or_threads(cuts: list[int], window: int | None, seed: int) -> None:
    made = prompts((200, 33), seed=seed)
    whole, whole_lse = run(made, [(0, 0, 200), (1, 0, 33)], window=window)
    edges = sorted({0, 200, *cuts})
    pieces = [run(made, [(0, a, b)], window=window) for a, b in itertools.pairwise(edges)]
    assert torch.equal(torch.cat([out[0] for out, _ in pieces]), whole[0])
    assert torch.equal(torch.cat([lse[0] for _, lse in pieces]), whole_lse[0])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(run(made, [(1, 0, 33), (0, 0, 200)], window=window)[0][1], whole[0])
    finally:
        torch.set_num_threads(threads)


def test_a_query_that_is_no_number_spoils_itself_alone() -> None:
    made = prompts((40,))
    clean = run(made, [(0, 0, 40)])[0][0]
    made.query[17, 3, 5] = torch.nan
    dirty = run(made, [(0, 0, 40)])[0][0]
    assert dirty[17, 3].isnan().all()
    dirty[17, 3] = clean[17, 3]
    assert torch.equal(dirty, clean)


def test_what_it_does_not_serve() -> None:
    assert not prefills("cpu", torch.float32, 64)
    assert not prefills("cpu", torch.bfloat16, 80)
    assert not prefills("cuda", torch.bfloat16, 64)


def test_outputs_with_gaps_between_heads_are_refused() -> None:
    made = prompts((4,))
    out = torch.empty(4, HEADS, 128).bfloat16()[..., :64]
    lens = torch.tensor([4], dtype=torch.int32)
    starts = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="contiguous heads"):
        prefill_attention(made.query, made.cache, made.table, starts, lens, out, scale=1.0, window=None, soft_cap=None)
