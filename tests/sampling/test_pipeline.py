"""The sampler with its processors: order, neighbours, rows that must not be touched, what log-probabilities are of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from enginebay.interfaces.sampler import LogitsProcessor, ProcessorContext, SamplerRows
from enginebay.interfaces.scheduler import Int32Array, NewRequest
from enginebay.plugins.records import NoOptions
from enginebay.sampling.params import SamplingParams
from enginebay.sampling.pipeline import Sampled, Sampler, StagedProcessor
from enginebay.sampling.sampler import SamplingRows, sample
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

SLOTS, LENGTH, VOCAB = 8, 16, 9
CONTEXT = ProcessorContext(
    vocab_size=VOCAB, max_num_seqs=SLOTS, max_model_len=LENGTH, device=torch.device("cpu"), options=NoOptions()
)


@dataclass
class Seat:
    """A row."""

    params: dict[str, Any] = field(default_factory=dict)
    prompt: list[int] = field(default_factory=lambda: [1, 2])
    output: list[int] = field(default_factory=list)
    words: tuple[tuple[int, ...], ...] = ()
    stops: frozenset[int] = frozenset()
    seed: int = 0
    samples: bool = True


def unused() -> SamplerRows:
    raise AssertionError("no row needs a processor")


def run(sampler: Sampler, logits: Tensor, seats: Sequence[Seat], slots: Sequence[int], *, view: bool = True) -> Sampled:
    """A step of these rows."""
    params = [SamplingParams(**seat.params) for seat in seats]
    token_ids = torch.full((SLOTS + 1, LENGTH), 3, dtype=torch.int32)
    requests = []
    for seat, slot, p in zip(seats, slots, params, strict=True):
        tokens = seat.prompt + seat.output
        token_ids[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        ids = np.array(tokens, dtype=np.int32)
        requests.append(NewRequest("r", slot, ids, len(seat.prompt), 0, p, seat.seed, seat.stops, seat.words))
    sampler.add(requests)
    index = np.array([len(seat.output) for seat in seats], dtype=np.int32)
    lengths = torch.tensor([len(seat.prompt) + len(seat.output) for seat in seats])
    slots_host = np.array(slots, dtype=np.int32)
    all_greedy = all(p.greedy for p in params)
    rows = SamplingRows(
        temperature=torch.tensor([p.temperature for p in params]),
        top_p=torch.tensor([p.top_p for p in params]),
        top_k=torch.tensor([p.top_k for p in params]),
        min_p=torch.tensor([p.min_p for p in params]),
        seed=torch.tensor([seat.seed for seat in seats]),
        output_index=torch.from_numpy(index.astype(np.int64)),
        all_greedy=all_greedy,
        any_top_k_or_p=not all_greedy and any(p.top_k > 0 or p.top_p < 1 for p in params),
        any_min_p=not all_greedy and any(p.min_p > 0 for p in params),
    )

    def make() -> SamplerRows:
        return SamplerRows(
            slots_host=slots_host,
            slots=torch.from_numpy(slots_host.astype(np.int64)),
            output_index=rows.output_index,
            output_index_host=index,
            token_ids=token_ids,
            num_tokens=lengths,
            num_prompt_tokens=torch.tensor([len(seat.prompt) for seat in seats]),
            max_num_tokens=int(lengths.max()),
        )

    samples = np.array([seat.samples for seat in seats])
    kept = logits.clone()
    sampled = sampler.sample(logits, rows, slots_host, samples, make if view else unused)
    assert torch.equal(logits, kept)
    return sampled


class Recorder(LogitsProcessor):
    """Notes the slots of the rows it sees, and changes them by a function."""

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda logits: logits) -> None:
        super().__init__(CONTEXT)
        self.change = change
        self.seen: list[list[int]] = []

    def add(self, requests: Sequence[NewRequest]) -> None:
        self.added = [request.slot for request in requests]

    def applies_to(self, slots: Int32Array) -> bool:
        return True

    def apply(self, logits: Tensor, rows: SamplerRows) -> None:
        assert len(logits) == len(rows.slots) == len(rows.num_tokens) == len(rows.num_prompt_tokens)
        assert rows.slots.tolist() == rows.slots_host.tolist()
        assert rows.output_index.tolist() == rows.output_index_host.tolist()
        self.seen.append(rows.slots_host.tolist())
        logits.copy_(self.change(logits))


params_strategy = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 1.7]),
        "top_p": st.sampled_from([0.4, 0.9]),
        "top_k": st.sampled_from([1, 3]),
        "min_p": st.sampled_from([0.2]),
        "repetition_penalty": st.sampled_from([0.6, 1.4]),
        "frequency_penalty": st.sampled_from([-1.5, 0.8]),
        "presence_penalty": st.sampled_from([-1.0, 1.2]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-2.0, 3.0]), max_size=3),
        "allowed_token_ids": st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
        "min_tokens": st.sampled_from([2, 16]),
        "logprobs": st.sampled_from([0, 2, -1]),
    },
)
token = st.integers(0, VOCAB - 1)
seat_strategy = st.builds(
    Seat,
    params=params_strategy,
    prompt=st.lists(token, min_size=1, max_size=6),
    output=st.lists(token, max_size=8),
    words=st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    stops=st.frozensets(token, max_size=2),
    seed=st.integers(0, 2**63 - 1),
)
MODES = ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


@given(
    seat=seat_strategy,
    others=st.lists(seat_strategy, max_size=5),
    place=st.integers(0, 5),
    seed=st.integers(0, 999),
    mode=st.sampled_from(MODES),
)
def test_a_row_is_what_it_is_alone(seat: Seat, others: list[Seat], place: int, seed: int, mode: Any) -> None:
    """Bit by bit: token, log-probabilities and rank, whatever its neighbours ask (C34, C35)."""
    place = min(place, len(others))
    seats = [*others[:place], seat, *others[place:]]
    logits = torch.randn(len(seats), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    together = run(Sampler(CONTEXT, (), mode), logits, seats, [(3 * i + 1) % SLOTS for i in range(len(seats))])
    alone = run(Sampler(CONTEXT, (), mode), logits[place : place + 1], [seat], [0])
    assert together.token_ids[place] == alone.token_ids[0]
    wanted = seat.params.get("logprobs")
    if wanted is None:
        assert alone.logprobs is None
        assert together.logprobs is None or place not in together.logprobs.rows
        return
    assert together.logprobs is not None
    assert alone.logprobs is not None
    line = together.logprobs.rows.tolist().index(place)
    width = 1 + (VOCAB if wanted < 0 else wanted)
    ours, theirs = together.logprobs.scores, alone.logprobs.scores
    assert torch.equal(ours.values[line, :width], theirs.values[0])
    assert torch.equal(ours.token_ids[line, :width], theirs.token_ids[0])
    assert ours.ranks[line] == theirs.ranks[0]


@given(seat=seat_strategy, seed=st.integers(0, 999))
def test_no_forbidden_token_is_drawn_c40(seat: Seat, seed: int) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))
    forbidden = set(seat.stops) if len(seat.output) < seat.params.get("min_tokens", 0) else set()
    if "allowed_token_ids" in seat.params:
        forbidden |= set(range(VOCAB)) - set(seat.params["allowed_token_ids"])
    for word in seat.words:
        n = len(word) - 1
        if n <= len(seat.output) and tuple(seat.output[len(seat.output) - n :]) == word[:-1]:
            forbidden.add(word[-1])
    drawn = int(run(Sampler(CONTEXT), logits, [seat], [2]).token_ids[0])
    assert drawn == -1 if len(forbidden) == VOCAB else drawn not in forbidden and drawn >= 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_vocabulary_is_forbidden_has_no_token(temperature: float) -> None:
    dead = Seat({"temperature": temperature, "allowed_token_ids": [4], "logprobs": 1}, words=((4,),))
    fine = Seat({"temperature": temperature, "allowed_token_ids": [4]})
    sampled = run(Sampler(CONTEXT), torch.randn(3, VOCAB), [fine, dead, fine], [0, 1, 2])
    assert sampled.token_ids.tolist() == [4, -1, 4]
    assert sampled.may_lack


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5, "min_p": 0.1}])
def test_stage_scaled_may_forbid_a_whole_row(mode: Any, filters: dict[str, float]) -> None:
    """Greedy rows have taken their token before it."""
    drawn = {"temperature": 1.0, **filters}
    seats = [Seat(drawn), Seat({"temperature": 0.0}), Seat(drawn)]
    sampler = Sampler(CONTEXT, [StagedProcessor(Recorder(lambda x: x.fill_(-torch.inf)), "scaled")], mode)
    logits = torch.randn(3, VOCAB)
    sampled = run(sampler, logits, seats, [0, 1, 2])
    assert sampled.token_ids.tolist() == [-1, int(logits[1].argmax()), -1]
    assert sampled.may_lack


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 2.0**-149},
        {"repetition_penalty": 0.5, "logit_bias": {1: 3.4e38, 2: 3.4e38}, "top_p": 0.5},
        {"repetition_penalty": 3.0, "logit_bias": {1: -3.4e38, 2: -3.4e38}, "min_p": 0.5},
        {"repetition_penalty": 3.0, "logit_bias": {1: -3.4e38, 2: -3.4e38}, "allowed_token_ids": [1, 2]},
    ],
)
def test_penalties_beyond_float32_leave_numbers(mode: Any, temperature: float, params: dict[str, Any]) -> None:
    params = {"allowed_token_ids": [1, 2, 5], **params, "temperature": temperature, "logprobs": 3}
    for seed in range(5):
        logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))
        sampled = run(Sampler(CONTEXT, (), mode), logits, [Seat(params, output=[5], seed=seed)], [0])
        assert int(sampled.token_ids[0]) in params["allowed_token_ids"]
        assert sampled.logprobs is not None
        assert not sampled.logprobs.scores.values.isnan().any()


def test_a_step_that_asks_nothing_is_the_plain_sampler() -> None:
    """The draws are `sample`'s, and processors' rows are not even made."""
    seats = [Seat({"temperature": t, "top_k": k}, seed=k) for t in (0.0, 0.8) for k in (0, 2)]
    logits = torch.randn(4, VOCAB)
    sampled = run(Sampler(CONTEXT), logits, seats, [0, 1, 2, 3], view=False)
    rows = SamplingRows(
        temperature=torch.tensor([0.0, 0.0, 0.8, 0.8]),
        top_p=torch.ones(4),
        top_k=torch.tensor([0, 2, 0, 2]),
        min_p=torch.zeros(4),
        seed=torch.tensor([0, 2, 0, 2]),
        output_index=torch.zeros(4, dtype=torch.int64),
        all_greedy=False,
        any_top_k_or_p=True,
        any_min_p=False,
    )
    assert torch.equal(sampled.token_ids, sample(logits, rows))
    assert not sampled.may_lack
    assert sampled.logprobs is None


def test_an_idle_processor_draws_the_same() -> None:
    seats = [Seat({"temperature": t, "top_k": k}, seed=k) for t in (0.0, 0.8) for k in (0, 2)]
    logits = torch.randn(4, VOCAB)
    plain = run(Sampler(CONTEXT), logits, seats, [0, 1, 2, 3])
    recorder = Recorder()
    idle = run(Sampler(CONTEXT, [StagedProcessor(recorder)]), logits, seats, [0, 1, 2, 3])
    assert torch.equal(idle.token_ids, plain.token_ids)
    assert recorder.added == [0, 1, 2, 3]
    assert recorder.seen == [[0, 1, 2, 3]]


def test_processors_see_the_rows_that_are_theirs() -> None:
    """Rows amid their prompt are nobody's; greedy rows skip what leaves the likeliest token."""
    changing, invariant, scaled = Recorder(), Recorder(), Recorder()
    staged = [
        StagedProcessor(changing),
        StagedProcessor(invariant, "logits", argmax_invariant=True),
        StagedProcessor(scaled, "scaled", argmax_invariant=True),
    ]
    sampler = Sampler(CONTEXT, staged)
    greedy, drawn = {"temperature": 0.0}, {"temperature": 1.0}
    seats = [Seat(drawn), Seat(greedy), Seat(drawn, samples=False), Seat(drawn)]
    run(sampler, torch.randn(4, VOCAB), seats, [4, 5, 6, 7])
    assert (changing.seen, invariant.seen, scaled.seen) == ([[4, 5, 7]], [[4, 7]], [[4, 7]])
    run(sampler, torch.randn(2, VOCAB), [Seat(greedy), Seat(greedy)], [1, 2])
    assert (changing.seen[1:], invariant.seen[1:], scaled.seen[1:]) == ([[1, 2]], [], [])


def test_the_order_of_stages() -> None:
    """Built-in, then plugins as listed, then temperature, then "scaled", then the filters."""
    noted: dict[str, Tensor] = {}

    def note(name: str, result: Callable[[Tensor], Tensor]) -> Recorder:
        def change(logits: Tensor) -> Tensor:
            noted[name] = logits.clone()
            return result(logits)

        return Recorder(change)

    staged = [
        StagedProcessor(note("late", lambda x: x), "scaled", argmax_invariant=True),
        StagedProcessor(note("first", lambda x: x * 2)),
        StagedProcessor(note("second", lambda x: x)),
    ]
    logits = torch.arange(VOCAB, dtype=torch.float32).unsqueeze(0)
    params = {"temperature": 0.5, "logit_bias": {0: 4.0}, "repetition_penalty": 2.0, "top_k": 1}
    run(Sampler(CONTEXT, staged), logits, [Seat(params, prompt=[0])], [0])
    expected = logits.clone()
    expected[0, 0] = (0 + 4) / 2  # the bias comes before the penalty
    assert torch.equal(noted["first"], expected)
    assert torch.equal(noted["second"], expected * 2)
    assert torch.equal(noted["late"], (expected * 2 - 16) / 0.5)


@pytest.mark.parametrize("mode", MODES)
def test_what_log_probabilities_are_of(mode: Any) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.0]])
    wide = torch.cat([logits, torch.full((1, VOCAB - 4), -30.0)], dim=1)
    biased = wide.clone()
    biased[0, 0] += 4.0
    seats = [Seat({"temperature": t, "logit_bias": {0: 4.0}, "logprobs": 2, "top_k": 2}) for t in (0.0, 0.5)]
    sampled = run(Sampler(CONTEXT, (), mode), wide.repeat(2, 1), seats, [0, 1])
    assert sampled.logprobs is not None
    cold, warm = biased, (biased / 0.5).index_fill(1, torch.tensor([1, 3, 4, 5, 6, 7, 8]), -torch.inf)
    source = torch.cat([cold, warm]) if mode.startswith("processed") else wide.repeat(2, 1)
    expected = source if mode.endswith("logits") else source.log_softmax(-1)
    scores = sampled.logprobs.scores
    torch.testing.assert_close(scores.values[:, 1:], expected.topk(2).values)
    assert torch.equal(scores.token_ids[:, 0].long(), sampled.token_ids)
    torch.testing.assert_close(scores.values[:, :1], expected.gather(1, sampled.token_ids.unsqueeze(1)))
