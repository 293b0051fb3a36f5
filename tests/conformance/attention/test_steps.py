"""Batches as the worker builds them."""

from __future__ import annotations

import torch
from enginebay.conformance.attention.steps import Row, make_batch
from hypothesis import given
from hypothesis import strategies as st


@given(
    st.lists(st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n))), min_size=1, max_size=6),
    st.integers(1, 40),
    st.integers(0, 2),
)
def test_batches_give_every_token_a_block_of_its_own(
    lens: list[tuple[int, int]], block_size: int, padding: int
) -> None:
    rows = [Row(q, n) for q, n in lens]
    batch, blocks = make_batch(
        rows, block_size=block_size, max_model_len=200, device=torch.device("cpu"), padding=padding
    )
    table = batch.groups[0].block_table
    used = [int(b) for r, row in enumerate(rows) for b in table[r, : -(-row.seq_len // block_size)]]
    assert sorted(used) == list(range(1, blocks))
    assert batch.positions.tolist() == [*(p for q, n in lens for p in range(n - q, n)), *[0] * padding]
    slots = batch.groups[0].slot_mapping.tolist()
    assert slots[len(slots) - padding :] == [-1] * padding
    expected = [
        int(table[r, p // block_size]) * block_size + p % block_size
        for r, (q, n) in enumerate(lens)
        for p in range(n - q, n)
    ]
    assert slots[: len(slots) - padding] == expected
