"""A device made of dictionaries: it runs the steps that a scheduler composes and checks each of them.

`Device` keeps what a worker keeps (tokens, counts and block tables by slot) and a KV cache whose every entry remembers the
tokens up to its position, and the cache salt, that it was written for. A step reads back its whole context (of a window
group: the window), so a block that was freed too early, given twice, never given, or found in the prefix cache for the wrong
request shows as a wrong entry. It does not know queues, policies or clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from enginebay.conformance.scheduler.answers import next_token, written
from enginebay.conformance.scheduler.arrangement import Arrangement
from enginebay.conformance.scheduler.watch import Topic, Watch
from enginebay.interfaces.scheduler import ModelOutput, NewRequest, Request, RequestStatus, SchedulerOutput


@dataclass
class Seat:
    """A slot as the device keeps it."""

    request: Request
    tokens: list[int]
    #: `written` of the tokens
    marks: list[int]
    #: tokens known when the request took the slot
    num_prefill: int
    #: column -> block, one a group
    tables: list[dict[int, int]]
    computed: int

    @property
    def wants_a_token(self) -> bool:
        """Whether its prompt is done and a further output is allowed."""
        outputs = len(self.tokens) - self.request.num_prompt_tokens
        return self.computed >= self.num_prefill and outputs < self.request.max_output_tokens


@dataclass
class Flying:
    """A step in flight."""

    output: SchedulerOutput
    result: ModelOutput
    #: blocks that each request's row reads, by request id
    named: dict[str, set[int]]
    #: token that each row sampled, by request id
    sampled: dict[str, int]


class Device:
    """Seats and a cache."""

    def __init__(self, arrangement: Arrangement, watch: Watch) -> None:
        self._arrangement, self._watch = arrangement, watch
        self.seats: dict[int, Seat] = {}
        #: (block, offset) -> the mark that was written there last
        self._cache: dict[tuple[int, int], int] = {}

    def execute(self, output: SchedulerOutput, known: Mapping[str, Request], flying: list[Flying]) -> Flying:
        """Run a step beside those in `flying`; `known` are all requests by id."""
        self._check_form(output)
        for new in output.new_requests:
            self._seat(new, known, flying)
        for slot in output.slots.tolist():
            self._watch.expect("seats", slot in self.seats, "slot {} has a row, but no request was seated there", slot)
        self._take_blocks(output)
        read: dict[str, set[int]] = {}
        written_blocks: dict[str, set[int]] = {}
        for row in range(output.num_rows):
            name = self._check_row(output, row)
            read[name], written_blocks[name] = self._blocks_of_row(output, row)
        self._check_owners(written_blocks, [read, *(step.named for step in flying)])
        sampled = [self._run_row(output, row) for row in range(output.num_rows)]
        token_ids = np.array([[-7 if token is None else token] for token in sampled], dtype=np.int32)
        num_sampled = np.array([token is not None for token in sampled], dtype=np.int32)
        tokens = {name: token for name, token in zip(read, sampled, strict=True) if token is not None}
        return Flying(output, ModelOutput(token_ids, num_sampled), read, tokens)

    def missing(self, seat: Seat) -> int:
        """Blocks that the seat lacks for its next token."""
        return sum(seat.computed // self._arrangement.block_size not in table for table in seat.tables)

    # --- checks of a step

    def _check_form(self, output: SchedulerOutput) -> None:
        expect, rows = self._watch.expect, output.num_rows
        expect("form", rows > 0, "a step without rows; return None instead")
        for name in ("slots", "num_scheduled_tokens", "num_computed_tokens", "output_index"):
            array = getattr(output, name)
            fits = array.dtype == np.int32 and array.shape == (rows,)
            expect("form", fits, "{} is {} {}, not int32 [{}]", name, array.dtype, array.shape, rows)
        samples = output.samples
        fits = samples.dtype == np.bool_ and samples.shape == (rows,)
        expect("form", fits, "samples is {} {}, not bool [{}]", samples.dtype, samples.shape, rows)
        expect("form", len(set(output.slots.tolist())) == rows, "two rows of one slot: {}", output.slots.tolist())
        groups = len(self._arrangement.windows)
        expect("form", len(output.new_blocks) == groups, "new_blocks has not one entry a cache group ({})", groups)
        expect("form", bool((output.num_scheduled_tokens >= 1).all()), "a row without tokens")
        entering = [new.slot for new in output.new_requests]
        others = rows - len(entering)
        expect(
            "form",
            output.slots.tolist()[others:] == entering,
            "the last rows must be the new requests in their order, {}, but the rows are {}",
            entering,
            output.slots.tolist(),
        )
        started = bool(output.num_computed_tokens[:others].all())
        expect("form", started, "a row at position 0 that is no new request")

    def _check_row(self, output: SchedulerOutput, row: int) -> str:
        """Check a row against what its seat knows; returns the request's id."""
        expect, seat = self._watch.expect, self.seats[int(output.slots[row])]
        name = seat.request.request_id
        form = _form(seat.request)
        start, count = int(output.num_computed_tokens[row]), int(output.num_scheduled_tokens[row])
        end, known = start + count, len(seat.tokens)
        expect(form, start == seat.computed, "{}: a row from token {}, computed are {}", name, start, seat.computed)
        expect(form, end <= known, "{}: a row up to token {}, known are {}", name, end, known)
        decodes = start >= seat.num_prefill
        expect(form, decodes == (row < output.num_decode_rows), "{}: decode rows come first, and no others", name)
        expect(form, count == 1 or not decodes, "{}: a decode row of {} tokens", name, count)
        samples = bool(output.samples[row])
        expect(form, samples == (end == known), "{}: samples={} at token {} of {}", name, samples, end, known)
        if samples:
            index, right = int(output.output_index[row]), known - seat.request.num_prompt_tokens
            expect(form, index == right, "{}: output_index {}, should be {}", name, index, right)
            most = seat.request.max_output_tokens
            expect(form, right < most, "{}: a row beyond its {} outputs", name, most)
        whole = self._arrangement.chunked_prefill or seat.num_prefill > self._arrangement.budget or decodes
        expect("budget", whole or end == seat.num_prefill, "{}: its prompt was cut, with chunked_prefill off", name)
        return name

    def _seat(self, new: NewRequest, known: Mapping[str, Request], flying: list[Flying]) -> None:
        expect, name, slot = self._watch.expect, new.request_id, new.slot
        expect("running", name in known, "a new request {!r} that was never added", name)
        request = known[name]
        most = self._arrangement.max_num_seqs
        expect("seats", 0 <= slot < most, "{} got slot {} of {}", name, slot, most)
        named = [step.output.step for step in flying if slot in step.output.slots]
        expect("seats", not named, "{} got slot {}, which step {} in flight names", name, slot, named)
        holder = self.seats[slot].request if slot in self.seats else None
        gone = holder is None or holder is request or holder.slot != slot or holder.status is not RequestStatus.RUNNING
        expect("seats", gone, "{} got slot {}, where another request runs", name, slot)
        tokens = [*request.prompt_token_ids.tolist(), *request.output_token_ids]
        form = _form(request)
        expect(form, new.token_ids.tolist() == tokens, "{}: token_ids are not its prompt and known outputs", name)
        for field in ("num_prompt_tokens", "params", "seed", "stop_token_ids", "bad_words"):
            expect(form, getattr(new, field) == getattr(request, field), "{}: its {} was changed", name, field)
        computed = new.num_computed_tokens
        expect("form", computed < len(tokens), "C30: {}: at least one token has to be computed", name)
        tables: list[dict[int, int]] = [{} for _ in self._arrangement.windows]
        self.seats[slot] = Seat(request, tokens, written(request, tokens), len(tokens), tables, computed)

    def _take_blocks(self, output: SchedulerOutput) -> None:
        last = self._arrangement.usable_blocks
        for group, gained in enumerate(output.new_blocks):
            for slot, column, block in zip(
                gained.slots.tolist(), gained.columns.tolist(), gained.block_ids.tolist(), strict=True
            ):
                self._watch.expect("blocks", 0 < block <= last, "slot {} got block {}", slot, block)
                self._watch.expect("blocks", slot in self.seats, "slot {} got a block, but no request", slot)
                self.seats[slot].tables[group][column] = block

    def _blocks_of_row(self, output: SchedulerOutput, row: int) -> tuple[set[int], set[int]]:
        """Blocks that the row reads, and those of them that it writes."""
        seat, size = self.seats[int(output.slots[row])], self._arrangement.block_size
        start = int(output.num_computed_tokens[row])
        end = start + int(output.num_scheduled_tokens[row])
        read, written_blocks = set(), set()
        for table, window in zip(seat.tables, self._arrangement.windows, strict=True):
            first = 0 if window is None else max(0, start - window + 1)
            for column in range(first // size, (end - 1) // size + 1):
                name = seat.request.request_id
                self._watch.expect("blocks", column in table, "{} has no block for column {}", name, column)
                read.add(table[column])
                if column >= start // size:
                    written_blocks.add(table[column])
        return read, written_blocks

    def _check_owners(self, written_blocks: dict[str, set[int]], steps: list[dict[str, set[int]]]) -> None:
        """Only whole, computed blocks are shared: what a row writes, nobody else reads, in this step or in flight."""
        for name, blocks in written_blocks.items():
            for step in steps:
                for other, named in step.items():
                    shared = other != name and bool(blocks & named)
                    self._watch.expect("blocks", not shared, "{} writes a block that {} reads", name, other)

    def _run_row(self, output: SchedulerOutput, row: int) -> int | None:
        """Write the row's tokens, read its context back, and sample if its last known token is reached."""
        seat, size = self.seats[int(output.slots[row])], self._arrangement.block_size
        start = int(output.num_computed_tokens[row])
        end = start + int(output.num_scheduled_tokens[row])
        for table, window in zip(seat.tables, self._arrangement.windows, strict=True):
            for position in range(start, end):
                self._cache[table[position // size], position % size] = seat.marks[position]
            for position in range(0 if window is None else max(0, start - window + 1), end):
                found = self._cache.get((table[position // size], position % size))
                right = found == seat.marks[position]
                name = seat.request.request_id
                self._watch.expect("answers", right, "{} finds another's keys at position {}", name, position)
        seat.computed = end
        if not output.samples[row]:
            return None
        token = next_token(seat.tokens)
        seat.tokens.append(token)
        seat.marks.append(hash((seat.marks[-1], token)))
        return token


def _form(request: Request) -> Topic:
    """The topic of a row's form: one that resumes after a preemption has its own."""
    return "preemption" if request.num_preemptions else "form"
