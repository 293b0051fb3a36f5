"""A device made of dictionaries: it runs the steps that a scheduler composes and checks each of them.

`Simulator` keeps what a worker keeps (tokens, counts and block tables by slot) and a KV cache whose every entry
remembers the tokens up to its position, and the cache salt, that it was written for. A step reads back its whole context
(of a window group: the window), so a block that was freed too early, given twice, never given, or found in the prefix
cache for the wrong request shows as a wrong entry. Tokens are a function of their own sequence alone:
whatever the arrangement, each request must get those of `Simulator.reference`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from enginebay.interfaces.scheduler import (
    FinishReason,
    ModelOutput,
    Request,
    RequestStatus,
    SchedulerContext,
    SchedulerOutput,
    SchedulingPolicy,
)
from enginebay.kv_cache.coordinator import KVCacheCoordinator
from enginebay.plugins.records import NoOptions
from enginebay.sampling.params import SamplingParams
from enginebay.scheduling.scheduler import TokenBudgetScheduler

VOCABULARY = 13


class Fcfs(SchedulingPolicy):
    """The plainest policy: every default, ordered by arrival."""

    def admission_key(self, request: Request) -> tuple[float, ...]:
        return (request.arrival,)


def next_token(tokens: Sequence[int]) -> int:
    """What the made-up model answers to a sequence."""
    return (7 * tokens[-1] + 3 * len(tokens) + sum(tokens)) % VOCABULARY


@dataclass
class Seat:
    """A slot as the device keeps it."""

    request: Request
    tokens: list[int]
    #: tokens known when the request took the slot
    num_prefill: int
    #: column -> block, one a group
    tables: list[dict[int, int]]
    computed: int


@dataclass
class Received:
    """What the client got of one request."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class Simulator:
    """A scheduler with its cache, run on a made-up device."""

    def __init__(
        self,
        *,
        policy: SchedulingPolicy | None = None,
        groups: int = 1,
        windows: Sequence[int | None] | None = None,
        prefix_caching: bool = False,
        block_size: int = 4,
        usable_blocks: int = 64,
        max_num_seqs: int = 4,
        budget: int = 16,
        max_model_len: int = 64,
        chunked_prefill: bool = True,
        max_prefill_tokens: int | None = None,
        concurrent: int = 1,
    ) -> None:
        self.windows = tuple(windows or [None] * groups)
        self.kv = KVCacheCoordinator(
            windows=self.windows,
            block_size=block_size,
            num_blocks=usable_blocks + 1,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_tokens_in_flight=budget * concurrent,
            prefix_caching=prefix_caching,
        )
        self.context = SchedulerContext(
            kv=self.kv,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            chunked_prefill=chunked_prefill,
            max_prefill_tokens=max_prefill_tokens,
            max_concurrent_batches=concurrent,
            policy=policy or Fcfs(),
            options=NoOptions(),
        )
        self.scheduler = TokenBudgetScheduler(self.context)
        self.groups, self.block_size = len(self.windows), block_size
        self.received: dict[str, Received] = {}
        self.seats: dict[int, Seat] = {}
        #: (block, offset) -> salt and tokens up to the one that was written there last
        self.cache: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
        #: steps in flight, their results, and the blocks that each names, by request
        self.flying: deque[tuple[SchedulerOutput, ModelOutput, dict[str, set[int]]]] = deque()
        #: request ids of each step, in the order of its rows
        self.history: list[list[str]] = []

    # --- requests

    def request(
        self,
        prompt: Iterable[int],
        outputs: int,
        stops: Iterable[int] = (),
        priority: int = 0,
        name: str = "",
        salt: str = "",
    ) -> Request:
        arrival = len(self.received)
        tokens = np.array(list(prompt), dtype=np.int32)
        return Request(
            name or f"r{arrival}",
            tokens,
            SamplingParams(max_tokens=max(outputs, 1)),
            frozenset(stops),
            outputs,
            seed=arrival,
            arrival=arrival,
            priority=priority,
            cache_extras=(("salt", salt),) if salt else (),
        )

    def add(
        self,
        prompt: Iterable[int],
        outputs: int,
        stops: Iterable[int] = (),
        priority: int = 0,
        name: str = "",
        salt: str = "",
    ) -> Request:
        made = self.request(prompt, outputs, stops, priority, name, salt)
        self.scheduler.add(made)
        self.received[made.request_id] = Received(made)
        return made

    def abort(self, *names: str) -> None:
        for delta in self.scheduler.abort(names):
            assert delta.finish_reason == "abort"
            assert delta.new_token_ids == []
            self._receive(delta.request_id, [], "abort")

    def tokens(self, name: str) -> list[int]:
        return self.received[name].tokens

    @staticmethod
    def reference(request: Request) -> tuple[list[int], FinishReason]:
        """The outputs and end of `request` when it runs alone and in full."""
        tokens = request.prompt_token_ids.tolist()
        for _ in range(request.max_output_tokens):
            tokens.append(next_token(tokens))
            if tokens[-1] in request.stop_token_ids:
                return tokens[request.num_prompt_tokens :], "stop"
        return tokens[request.num_prompt_tokens :], "length"

    # --- steps

    def step(self) -> SchedulerOutput | None:
        """Schedule one step and let the device run it."""
        free = self.scheduler.stats().num_in_flight_steps < self.context.max_concurrent_batches
        output = self.scheduler.schedule()
        if output is not None:
            assert free
            self.flying.append((output, *self._execute(output)))
        return output

    def retire(self) -> None:
        """Give the scheduler the result of the oldest step in flight."""
        output, result, _ = self.flying.popleft()
        deltas = self.scheduler.update(output, result)
        assert len({d.request_id for d in deltas}) == len(deltas)
        for delta in deltas:
            self._receive(delta.request_id, delta.new_token_ids, delta.finish_reason)
            if delta.finish_reason == "stop":
                assert delta.stop_token_id == delta.new_token_ids[-1]

    def run(self, steps: int | None = None) -> None:
        """Run until all is done, keeping as many steps in flight as allowed; or for `steps` steps."""
        ran, bound = 0, self._bound()
        while self.scheduler.has_unfinished() if steps is None else ran < steps:
            if self.step() is None or len(self.flying) == self.context.max_concurrent_batches:
                assert self.flying, "C22: something waits, nothing is in flight, and nothing can run"
                self.retire()
            ran += 1
            assert ran <= bound, "C22: no end in sight"

    def check_idle(self) -> None:
        """C24: when nothing is unfinished, everything is back and everyone got what it should."""
        stats = self.scheduler.stats()
        assert (stats.num_waiting, stats.num_running, stats.num_in_flight_steps) == (0, 0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        for got in self.received.values():
            tokens, reason = self.reference(got.request)
            assert got.request.status is RequestStatus.FINISHED
            assert got.request.slot == -1
            assert got.request.finish_reason == got.finish_reason
            assert got.tokens == got.request.output_token_ids
            if got.finish_reason == "abort":
                assert got.tokens == tokens[: len(got.tokens)]
            else:
                assert (got.tokens, got.finish_reason) == (tokens, reason)

    def _bound(self) -> int:
        """Steps within which everything unfinished must end, recomputation included."""
        sizes = [r.request.num_prompt_tokens + r.request.max_output_tokens for r in self.received.values()]
        return 100 + 20 * sum(sizes) * (len(sizes) + 1)

    def _receive(self, name: str, tokens: list[int], reason: FinishReason | None) -> None:
        got = self.received[name]
        assert got.finish_reason is None, "something came after the end"
        got.tokens += tokens
        got.finish_reason = reason

    # --- the device

    def _execute(self, output: SchedulerOutput) -> tuple[ModelOutput, dict[str, set[int]]]:
        self._check_shape(output)
        for new in output.new_requests:
            self._check_seniority(self.received[new.request_id].request)
            assert not any(new.slot in step.slots for step, _, _ in self.flying), "slot reused in flight"
            request = self.received[new.request_id].request
            assert new.token_ids.tolist() == [*request.prompt_token_ids.tolist(), *request.output_token_ids]
            assert new.num_prompt_tokens == request.num_prompt_tokens
            assert new.num_computed_tokens < len(new.token_ids), "C30: at least one token is computed"
            tables: list[dict[int, int]] = [{} for _ in range(self.groups)]
            tokens = new.token_ids.tolist()
            self.seats[new.slot] = Seat(request, tokens, len(tokens), tables, new.num_computed_tokens)
        for group, gained in enumerate(output.new_blocks):
            for slot, column, block in zip(gained.slots, gained.columns, gained.block_ids, strict=True):
                assert 0 < block <= self.kv.num_blocks
                self.seats[int(slot)].tables[group][int(column)] = int(block)
        read: dict[str, set[int]] = {}
        written: dict[str, set[int]] = {}
        for row, slot in enumerate(output.slots.tolist()):
            name = self.seats[slot].request.request_id
            read[name], written[name] = self._blocks_of_row(output, row)
        self._check_owners(read, written)
        sampled = [self._run_row(output, row) for row in range(output.num_rows)]
        self.history.append([self.seats[slot].request.request_id for slot in output.slots.tolist()])
        token_ids = np.array([[-7 if token is None else token] for token in sampled], dtype=np.int32)
        num_sampled = np.array([token is not None for token in sampled], dtype=np.int32)
        return ModelOutput(token_ids, num_sampled), read

    def _blocks_of_row(self, output: SchedulerOutput, row: int) -> tuple[set[int], set[int]]:
        """Blocks that the row reads, and those of them that it writes."""
        seat, size = self.seats[int(output.slots[row])], self.block_size
        start = int(output.num_computed_tokens[row])
        end = start + int(output.num_scheduled_tokens[row])
        read, written = set(), set()
        for table, window in zip(seat.tables, self.windows, strict=True):
            first = 0 if window is None else max(0, start - window + 1)
            for column in range(first // size, (end - 1) // size + 1):
                assert column in table, "blocks do not cover the row"
                read.add(table[column])
                if column >= start // size:
                    written.add(table[column])
        return read, written

    def _check_owners(self, read: dict[str, set[int]], written: dict[str, set[int]]) -> None:
        """Only whole, computed blocks are shared: what a row writes, nobody else reads, in this step or in flight."""
        for name, blocks in written.items():
            for step in (read, *(named for _, _, named in self.flying)):
                for other, named in step.items():
                    assert other == name or not blocks & named, "a block is written while another request reads it"

    def _check_shape(self, output: SchedulerOutput) -> None:
        rows = output.num_rows
        assert 0 < rows == len(set(output.slots.tolist()))
        assert all(0 <= slot < self.context.max_num_seqs for slot in output.slots.tolist())
        assert output.num_tokens <= self.context.max_num_batched_tokens
        for array in (output.slots, output.num_scheduled_tokens, output.num_computed_tokens, output.output_index):
            assert array.dtype == np.int32
            assert len(array) == rows
        assert output.samples.dtype == np.bool_
        assert len(output.new_blocks) == self.groups
        # decode | extend | prefill, and the prefill rows are the new requests
        computed = output.num_computed_tokens.tolist()
        num_new = len(output.new_requests)
        assert all(computed[: rows - num_new])
        assert output.slots.tolist()[rows - num_new :] == [new.slot for new in output.new_requests]

    def _check_seniority(self, admitted: Request) -> None:
        """Whoever precedes a newly admitted request in the policy's order runs already."""
        policy = self.scheduler.context.policy
        assert policy is not None
        key = (policy.admission_key(admitted), admitted.arrival)
        for got in self.received.values():
            other = got.request
            if other.finish_reason is None and (policy.admission_key(other), other.arrival) < key:
                assert other.status is RequestStatus.RUNNING

    def _run_row(self, output: SchedulerOutput, row: int) -> int | None:
        """Write the row's tokens, read its context back, and sample if its last known token is reached."""
        seat = self.seats[int(output.slots[row])]
        start, count = int(output.num_computed_tokens[row]), int(output.num_scheduled_tokens[row])
        end = start + count
        assert start == seat.computed, "a position skipped or computed twice"
        assert count >= 1
        assert end <= len(seat.tokens)
        decodes = start >= seat.num_prefill
        assert decodes == (row < output.num_decode_rows)
        assert count == 1 or not decodes
        if not self.context.chunked_prefill and seat.num_prefill <= self.context.max_num_batched_tokens and not decodes:
            assert end == seat.num_prefill, "a prompt was cut"
        salt = dict(seat.request.cache_extras).get("salt", "")
        for table, window in zip(seat.tables, self.windows, strict=True):
            first = 0 if window is None else max(0, start - window + 1)
            places = {p: (table[p // self.block_size], p % self.block_size) for p in range(first, end)}
            for position in range(start, end):
                self.cache[places[position]] = (salt, tuple(seat.tokens[: position + 1]))
            for position, place in places.items():
                assert self.cache[place] == (salt, tuple(seat.tokens[: position + 1])), "a wrong entry"
        seat.computed = end
        assert bool(output.samples[row]) == (end == len(seat.tokens))
        if not output.samples[row]:
            return None
        index = len(seat.tokens) - seat.request.num_prompt_tokens
        assert output.output_index[row] == index < seat.request.max_output_tokens
        seat.tokens.append(next_token(seat.tokens))
        return seat.tokens[-1]


@pytest.fixture(scope="session")
def simulator() -> type[Simulator]:
    """The class `Simulator`; of session scope, so that hypothesis may use it."""
    return Simulator
