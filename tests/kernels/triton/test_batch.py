"""The fused preparation of a step, and the store of its tokens, equal their torch twins bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar

import pytest
import torch
from enginebay.kernels import batch as twin
from enginebay.kernels.batch import SlotState, StepBuffers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

fused = pytest.importorskip("enginebay.kernels.triton.batch")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Tensors = TypeVar("Tensors", SlotState, StepBuffers)
#: in what no step writes, so that a write too many is seen
UNTOUCHED = -7


def random(*shape: int, dtype: torch.dtype = torch.int64, high: int = 1000) -> Tensor:
    return torch.randint(0, high, shape, dtype=dtype)


@dataclass
class Case:
    """A step of random requests: `counts` tokens each behind `computed` ones; the first `decode` have one token."""

    counts: list[int]
    computed: list[int]
    decode: int
    padding: int = 0
    samples: list[bool] | None = None
    groups: int = 1
    block_size: int = 4

    def __post_init__(self) -> None:
        self.real = len(self.counts)
        self.rows = self.real + self.padding
        self.tokens = sum(self.counts) + self.padding
        self.slots = self.rows + 2
        self.length = max([1, *(a + b for a, b in zip(self.counts, self.computed, strict=True))])
        self.columns = -(-self.length // self.block_size)
        torch.manual_seed(self.tokens)
        self.order = torch.randperm(self.slots - 1)[: self.real]

    def state(self) -> SlotState:
        computed = random(self.slots, high=self.length)
        computed[-1] = 0
        computed[self.order] = torch.tensor(self.computed, dtype=torch.int64)
        tables = random(self.groups, self.slots, self.columns, dtype=torch.int32)
        tables[:, -1] = 0
        return SlotState(
            token_ids=random(self.slots, self.length, dtype=torch.int32),
            num_computed=computed,
            block_tables=tables,
            floats=torch.rand(3, self.slots),
            integers=random(2, self.slots) - 500,
        )

    def step(self) -> Tensor:
        last, pad = self.slots - 1, [1] * self.padding
        samples = self.samples or [True] * self.real
        return torch.tensor(
            [
                [*self.order.tolist(), *[last] * self.padding],
                [*self.counts, *pad],
                [*samples, *[0] * self.padding],
                [*range(7, 7 + self.real), *[0] * self.padding],
            ],
            dtype=torch.int32,
        )

    def buffers(self) -> StepBuffers:
        def buffer(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full(shape, UNTOUCHED, dtype=dtype)

        rows, tokens, int32 = self.rows + 3, self.tokens + 5, torch.int32
        return StepBuffers(
            slot_of_row=buffer(rows),
            num_scheduled=buffer(rows),
            seq_lens=buffer(rows, dtype=int32),
            query_start_loc=torch.cat((torch.zeros(1, dtype=int32), buffer(rows, dtype=int32))),
            prefill_start_loc=torch.cat((torch.zeros(1, dtype=int32), buffer(rows, dtype=int32))),
            logits_indices=buffer(rows),
            floats=buffer(3, rows, dtype=torch.float32),
            integers=buffer(3, rows),
            positions=buffer(tokens),
            input_ids=buffer(tokens),
            block_tables=buffer(self.groups, rows, self.columns, dtype=int32),
            slot_mappings=buffer(self.groups, tokens),
        )

    def prepare(
        self, prepare: Callable[..., None], state: SlotState, buffers: StepBuffers, step: Tensor, **more: int
    ) -> None:
        prepare(
            state,
            buffers,
            step,
            num_decode_rows=self.decode + self.padding,
            num_padding_rows=self.padding,
            max_query_len=max([1, *self.counts]),
            max_seq_len=self.length,
            block_size=self.block_size,
            **more,
        )


def moved(tensors: Tensors) -> Tensors:
    return type(tensors)(**{f.name: getattr(tensors, f.name).clone().to(DEVICE) for f in fields(tensors)})


def check(case: Case) -> None:
    state, step, expected = case.state(), case.step(), case.buffers()
    got = moved(expected)
    case.prepare(twin.prepare, state, expected, step, num_tokens=case.tokens)
    case.prepare(fused.prepare, moved(state), got, step.to(DEVICE))
    seq_lens = expected.seq_lens[: case.rows]
    for field in fields(expected):
        ours, theirs = getattr(got, field.name).cpu(), getattr(expected, field.name)
        if field.name == "block_tables":
            for row, held in enumerate((-(-seq_lens // case.block_size)).tolist()):
                assert torch.equal(ours[:, row, :held], theirs[:, row, :held])
                assert (ours[:, row, held:] == UNTOUCHED).all()
            assert (ours[:, case.rows :] == UNTOUCHED).all()
        else:
            assert torch.equal(ours, theirs), field.name


@st.composite
def cases(draw: st.DrawFn) -> Case:
    decode = draw(st.integers(0, 6))
    others = draw(st.lists(st.integers(1, 20), max_size=5))
    rows = decode + len(others)
    padding = 0 if others else draw(st.integers(0 if rows else 1, 4))
    return Case(
        counts=[1] * decode + others,
        computed=draw(st.lists(st.integers(0, 30), min_size=rows, max_size=rows)),
        decode=decode,
        padding=padding,
        samples=draw(st.lists(st.booleans(), min_size=rows, max_size=rows)),
        groups=draw(st.integers(1, 3)),
        block_size=draw(st.sampled_from([1, 4, 16])),
    )


@settings(max_examples=60)
@given(case=cases())
def test_a_step_is_prepared_as_by_the_twin(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case([1300, 3, 700], [5, 9, 0], 0), id="rows of several chunks of tokens"),
        pytest.param(Case([1, 1], [2500, 3], 2, block_size=2), id="a table of several chunks of columns"),
        pytest.param(Case([1] * 3 + [2] * 600, [4] * 603, 3), id="more rows than a chunk sums at once"),
    ],
)
def test_what_one_program_cannot_hold(case: Case) -> None:
    check(case)


@settings(max_examples=40)
@given(case=cases().filter(lambda case: case.real > 0))
def test_sampled_tokens_are_stored_as_by_the_twin(case: Case) -> None:
    """Of rows amid their prompt none, of a full row inside its line (the longest of a case is full)."""
    state, step, buffers = case.state(), case.step(), case.buffers()
    case.prepare(twin.prepare, state, buffers, step, num_tokens=case.tokens)
    sampled = random(case.real)
    theirs, ours = state.token_ids.clone(), state.token_ids.clone().to(DEVICE)
    every = bool(step[2, : case.real].all())
    twin.store_sampled(theirs, buffers, step, sampled, every_row_samples=every)
    fused.store_sampled(ours, moved(buffers), step.to(DEVICE), sampled.to(DEVICE))
    assert torch.equal(ours.cpu(), theirs)
