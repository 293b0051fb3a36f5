"""`SlotBatch` against a plain Python account of the same steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from enginebay.interfaces.batch import NULL_BLOCK, NULL_SLOT, Batch, PhaseBatch
from enginebay.interfaces.scheduler import NewBlocks, NewRequest, SchedulerOutput
from enginebay.sampling.params import SamplingParams
from enginebay.worker.batch import SlotBatch
from hypothesis import given, settings
from hypothesis import strategies as st

ROWS, TOKENS, LENGTH, BLOCK, GROUPS = 5, 40, 24, 4, 2


def int32(values: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def make_batch() -> SlotBatch:
    return SlotBatch(
        max_num_seqs=ROWS,
        max_num_tokens=TOKENS,
        max_model_len=LENGTH,
        block_size=BLOCK,
        num_groups=GROUPS,
        device=torch.device("cpu"),
    )


@dataclass
class Seat:
    """What a slot holds, in lists."""

    tokens: list[int]
    prompt: int
    computed: int = 0
    blocks: list[list[int]] = field(default_factory=lambda: [[] for _ in range(GROUPS)])


class Account:
    """Makes scheduler outputs and says in plain Python what the batch must hold."""

    def __init__(self) -> None:
        self.batch = make_batch()
        self.seats: dict[int, Seat] = {}
        self.next_block = 1
        self.step = 0
        self.new: list[NewRequest] = []

    def enter(self, slot: int, tokens: list[int], params: SamplingParams | None = None, seed: int = 0) -> None:
        self.seats[slot] = Seat(list(tokens), len(tokens))
        given = params or SamplingParams()
        self.new.append(NewRequest(f"r{slot}", slot, int32(tokens), len(tokens), 0, given, seed))

    def output(self, counts: dict[int, int]) -> SchedulerOutput:
        """Rows in the contract's order: decode, extend, prefill."""

        def phase(slot: int) -> int:
            seat = self.seats[slot]
            if counts[slot] == 1 and seat.computed >= seat.prompt:
                return 0
            return 1 if seat.computed else 2

        order = sorted(counts, key=lambda slot: (phase(slot), slot))
        gained: list[list[tuple[int, int, int]]] = [[] for _ in range(GROUPS)]
        for slot in order:
            seat = self.seats[slot]
            for group in range(GROUPS):
                while len(seat.blocks[group]) * BLOCK < seat.computed + counts[slot]:
                    gained[group].append((slot, len(seat.blocks[group]), self.next_block))
                    seat.blocks[group].append(self.next_block)
                    self.next_block += 1
        seats = [self.seats[slot] for slot in order]
        self.step += 1
        new, self.new = self.new, []
        return SchedulerOutput(
            step=self.step,
            new_requests=new,
            slots=int32(order),
            num_scheduled_tokens=int32([counts[slot] for slot in order]),
            num_computed_tokens=int32([seat.computed for seat in seats]),
            num_decode_rows=sum(phase(slot) == 0 for slot in order),
            samples=np.array([s.computed + counts[o] == len(s.tokens) for o, s in zip(order, seats, strict=True)]),
            output_index=int32([len(seat.tokens) - seat.prompt for seat in seats]),
            new_blocks=tuple(NewBlocks(*(int32([entry[i] for entry in g]) for i in range(3))) for g in gained),
        )

    def finish(self, output: SchedulerOutput, sampled: list[int]) -> None:
        """Advance both sides and append the sampled tokens where a row samples."""
        self.batch.advance(output)
        self.batch.store_sampled(output, torch.tensor(sampled))
        for row, slot in enumerate(output.slots.tolist()):
            seat = self.seats[slot]
            seat.computed += int(output.num_scheduled_tokens[row])
            if output.samples[row]:
                seat.tokens.append(sampled[row])

    def check(self, output: SchedulerOutput, got: Batch, pad: int = 0) -> None:
        slots = output.slots.tolist()
        counts = output.num_scheduled_tokens.tolist()
        positions: list[int] = []
        ids: list[int] = []
        mappings: list[list[int]] = [[] for _ in range(GROUPS)]
        for slot, count in zip(slots, counts, strict=True):
            seat = self.seats[slot]
            for position in range(seat.computed, seat.computed + count):
                positions.append(position)
                ids.append(seat.tokens[position])
                for group in range(GROUPS):
                    block = seat.blocks[group][position // BLOCK]
                    mappings[group].append(block * BLOCK + position % BLOCK)
        real, rows = len(positions), len(slots)
        assert (got.num_rows, got.num_tokens) == (rows + pad, real + pad)
        assert got.slot_of_row.tolist() == slots + [self.batch.pad_slot] * pad
        assert got.positions.tolist() == positions + [0] * pad
        assert got.input_ids[:real].tolist() == ids
        assert got.logits_indices.tolist() == [*(np.cumsum(counts) - 1).tolist(), *range(real, real + pad)]
        for mapping, expected in zip(got.slot_mappings, mappings, strict=True):
            assert mapping.tolist() == expected + [NULL_SLOT] * pad
        decode = output.num_decode_rows
        self._check_phase(got, got.decode, slots[:decode], counts[:decode], 0, pad)
        self._check_phase(got, got.prefill, slots[decode:], counts[decode:], sum(counts[:decode]) + pad, 0)

    def _check_phase(
        self, got: Batch, phase: PhaseBatch | None, slots: list[int], counts: list[int], token0: int, pad: int
    ) -> None:
        if not slots and not pad:
            assert phase is None
            return
        assert phase is not None
        counts = counts + [1] * pad
        lens = [self.seats[s].computed + c for s, c in zip(slots, counts, strict=False)] + [1] * pad
        start = [0, *np.cumsum(counts).tolist()]
        assert (phase.num_rows, phase.num_tokens) == (len(counts), sum(counts))
        assert (phase.max_query_len, phase.max_seq_len) == (max(counts), max(lens))
        assert phase.query_start_loc.tolist() == phase.query_start_loc_host.tolist() == start
        assert phase.seq_lens.tolist() == phase.seq_lens_host.tolist() == lens
        assert phase.query_start_loc.dtype == phase.seq_lens.dtype == torch.int32
        assert torch.equal(phase.positions, got.positions[token0 : token0 + sum(counts)])
        assert len(phase.groups) == GROUPS
        for index, group in enumerate(phase.groups):
            assert torch.equal(group.slot_mapping, got.slot_mappings[index][token0 : token0 + sum(counts)])
            assert group.block_table.dtype == torch.int32
            for row, slot in enumerate(slots):
                blocks = self.seats[slot].blocks[index]
                assert group.block_table[row, : len(blocks)].tolist() == blocks
            for row in range(len(slots), len(counts)):
                assert group.block_table[row, 0] == NULL_BLOCK


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_steps_equal_a_plain_account(data: st.DataObject) -> None:
    """Requests come, go, are chunked and decode; slots are reused by others with stale lines in them."""
    account = Account()
    for _ in range(data.draw(st.integers(1, 10), label="steps")):
        for slot in range(ROWS):
            seat = account.seats.get(slot)
            over = seat is not None and (len(seat.tokens) >= LENGTH or data.draw(st.integers(0, 5)) == 0)
            if (seat is None or over) and data.draw(st.booleans()):
                account.enter(slot, data.draw(st.lists(st.integers(0, 999), min_size=1, max_size=12)))
            elif over:
                del account.seats[slot]
        counts, left = {}, TOKENS
        for slot in data.draw(st.permutations(sorted(account.seats))):
            seat = account.seats[slot]
            fresh = any(request.slot == slot for request in account.new)
            if fresh or data.draw(st.integers(0, 3)):
                counts[slot] = data.draw(st.integers(1, min(len(seat.tokens) - seat.computed, left)))
                left -= counts[slot]
            if left == 0:
                break
        account.new = [request for request in account.new if request.slot in counts]
        for slot in [s for s, seat in account.seats.items() if s not in counts and seat.computed == 0]:
            del account.seats[slot]
        if not counts:
            continue
        output = account.output(counts)
        padded = None
        if output.num_decode_rows == output.num_rows:
            padded = data.draw(st.none() | st.integers(0, ROWS), label="padded rows")
        got = account.batch.apply(output, padded)
        account.check(output, got, pad=max((padded or 0) - output.num_rows, 0))
        account.finish(output, data.draw(st.lists(st.integers(0, 999), min_size=len(counts), max_size=len(counts))))


def test_a_mixed_step_by_hand() -> None:
    """A decode row, an extend row and a prefill row, two groups with block ids of their own."""
    account = Account()
    account.enter(3, [10, 11])
    account.enter(1, [20, 21, 22, 23, 24, 25])
    output = account.output({3: 2, 1: 3})
    account.batch.apply(output)
    account.finish(output, [0, 77])  # slot 1 is amid its prompt; slot 3 samples 77
    account.enter(0, [30, 31])
    output = account.output({3: 1, 1: 3, 0: 2})
    got = account.batch.apply(output)
    assert got.slot_of_row.tolist() == [3, 1, 0]
    assert got.input_ids.tolist() == [77, 23, 24, 25, 30, 31]
    assert got.positions.tolist() == [2, 3, 4, 5, 0, 1]
    assert got.logits_indices.tolist() == [0, 3, 5]
    assert got.num_decode_tokens == 1
    assert got.prefill is not None
    assert got.prefill.query_start_loc.tolist() == [0, 3, 5]
    assert got.prefill.seq_lens.tolist() == [6, 2]
    assert (got.prefill.max_query_len, got.prefill.max_seq_len) == (3, 6)
    first, second = got.slot_mappings
    assert not set(first.tolist()) & set(second.tolist())
    account.check(output, got)


def test_padding_rows_have_one_token_the_null_block_and_no_slot() -> None:
    account = Account()
    account.enter(2, [5, 6, 7])
    output = account.output({2: 3})
    account.batch.apply(output)
    account.finish(output, [9])
    for token in (41, 42):
        output = account.output({2: 1})
        got = account.batch.apply(output, padded_rows=4)
        assert got.decode is not None
        assert got.decode.seq_lens.tolist()[1:] == [1, 1, 1]
        for group in got.decode.groups:
            assert group.block_table[1:].eq(NULL_BLOCK).all()
            assert group.slot_mapping.tolist()[1:] == [-1, -1, -1]
        assert len(account.batch.sampling_rows(output).seed) == 1
        account.check(output, got, pad=3)
        account.finish(output, [token])


def test_a_sampled_token_is_what_the_next_step_reads() -> None:
    account = Account()
    account.enter(0, [1, 2])
    output = account.output({0: 2})
    account.batch.apply(output)
    account.finish(output, [500])
    for token in (501, 502, 503):
        output = account.output({0: 1})
        assert account.batch.apply(output).input_ids.tolist() == [token - 1]
        account.finish(output, [token])


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_rows_amid_their_prompt_keep_its_tokens(chunk: int) -> None:
    prompt = [50, 51, 52, 53, 54, 55, 56]
    account = Account()
    account.enter(4, prompt)
    account.enter(1, [1])
    read: list[int] = []
    while account.seats[4].computed < len(prompt):
        count = min(chunk, len(prompt) - account.seats[4].computed)
        output = account.output({4: count, 1: 1})
        got = account.batch.apply(output)
        row = output.slots.tolist().index(4)
        end = int(got.logits_indices[row]) + 1
        read += got.input_ids[end - count : end].tolist()
        account.finish(output, [900, 900])
    assert read == prompt
    assert account.batch.token_ids[4, : len(prompt) + 1].tolist() == [*prompt, 900]


def test_the_last_token_of_a_full_row_stays_in_its_line() -> None:
    account = Account()
    account.enter(0, list(range(LENGTH)))
    account.enter(1, [7, 8])
    output = account.output({0: LENGTH, 1: 2})
    account.batch.apply(output)
    account.finish(output, [600, 601])
    assert account.batch.token_ids[0, :-1].tolist() == list(range(LENGTH - 1))
    assert account.batch.token_ids[1, :3].tolist() == [7, 8, 601]


def test_sampling_rows_follow_the_slots() -> None:
    account = Account()
    greedy = SamplingParams(temperature=0.0, top_p=0.5, min_p=0.25)
    drawn = SamplingParams(temperature=0.5, top_p=0.75, top_k=-1, min_p=0.125)
    account.enter(0, [1], greedy, seed=2**64 - 1)
    account.enter(3, [2], drawn, seed=6)
    account.enter(1, [3], SamplingParams(temperature=2.0), seed=7)
    output = account.output({0: 1, 3: 1, 1: 1})
    account.batch.apply(output)
    rows = account.batch.sampling_rows(output)
    assert output.slots.tolist() == [0, 1, 3]
    assert rows.temperature.tolist() == [0.0, 2.0, 0.5]
    assert rows.top_p.tolist() == [0.5, 1.0, 0.75]
    assert rows.top_k.tolist() == [0, 0, 0]  # -1 keeps all, as 0 does
    assert rows.min_p.tolist() == [0.25, 0.0, 0.125]
    assert rows.seed.tolist() == [-1, 7, 6]
    assert rows.output_index.tolist() == [0, 0, 0]
    assert (rows.all_greedy, rows.any_top_k_or_p, rows.any_min_p) == (False, True, True)
    account.finish(output, [4, 5, 6])
    for counts, flags in (
        ({0: 1}, (True, False, False)),
        ({1: 1}, (False, False, False)),
        ({3: 1}, (False, True, True)),
    ):
        output = account.output(counts)
        account.batch.apply(output)
        rows = account.batch.sampling_rows(output)
        assert (rows.all_greedy, rows.any_top_k_or_p, rows.any_min_p) == flags
        assert rows.output_index.tolist() == [1]


def test_logits_processors_see_prompt_outputs_and_counts() -> None:
    """Tokens that only the device knows included, padding left out."""
    account = Account()
    account.enter(2, [5, 6, 7])
    account.enter(0, [8])
    output = account.output({2: 3, 0: 1})
    account.batch.apply(output)
    account.finish(output, [41, 40])  # rows are in the order of slots
    output = account.output({2: 1, 0: 1})
    account.batch.apply(output, padded_rows=4)
    rows = account.batch.sampler_rows(output)
    assert rows.slots.tolist() == rows.slots_host.tolist() == [0, 2]
    assert rows.output_index.tolist() == rows.output_index_host.tolist() == [1, 1]
    assert rows.num_tokens.tolist() == [2, 4]
    assert rows.num_prompt_tokens.tolist() == [1, 3]
    assert rows.max_num_tokens == 4
    assert rows.token_ids[0, :2].tolist() == [8, 41]
    assert rows.token_ids[2, :4].tolist() == [5, 6, 7, 40]


def test_views_keep_their_addresses() -> None:
    """A captured graph finds the same buffers again."""
    account = Account()
    account.enter(0, [1, 2, 3])
    output = account.output({0: 3})
    first = account.batch.apply(output)
    account.finish(output, [4])
    second = account.batch.apply(account.output({0: 1}))
    for name in ("slot_of_row", "input_ids", "positions", "logits_indices"):
        assert getattr(first, name).data_ptr() == getattr(second, name).data_ptr()
    for before, after in zip(first.slot_mappings, second.slot_mappings, strict=True):
        assert before.data_ptr() == after.data_ptr()
