"""Laws of the KV accounting, under random lives of requests, against plain lists and dictionaries.

The model writes into each block what a device would: the tokens up to the block's end and the extras under which they were
computed. Every block that a step reads, found or own, must hold just that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from enginebay.interfaces.scheduler import Int32Array, NewBlocks, PrefixHit, Request
from enginebay.kv_cache.coordinator import KVCacheCoordinator
from enginebay.sampling.params import SamplingParams
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

BLOCK, SLOTS, LONGEST, IN_FLIGHT = 3, 3, 30, 7
Extras = tuple[tuple[str, str], ...]
#: what a block holds: extras, the tokens up to its end, and how often the cache had been reset when its writer was seated
Content = tuple[Extras, tuple[int, ...], int]


def ids(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


@dataclass
class Seat:
    """A running request as the device sees it."""

    request: Request
    resets: int
    #: blocks by column, one table a group
    tables: list[dict[int, int]]
    #: tokens computed by retired steps, and those of all steps
    computed: int = 0
    reached: int = 0


@dataclass
class Model:
    """What is where."""

    contents: dict[int, Content] = field(default_factory=dict)
    #: block of a content, one map a group
    findable: list[dict[Content, int]] = field(default_factory=list)
    seats: dict[int, Seat] = field(default_factory=dict)
    waiting: list[Request] = field(default_factory=list)


def tokens_of(request: Request) -> list[int]:
    return [*request.prompt_token_ids.tolist(), *request.output_token_ids]


class CoordinatorMachine(RuleBasedStateMachine):
    """Requests over few tokens, so that prefixes meet; few blocks, so that they are reused."""

    @initialize(
        windows=st.lists(st.none() | st.sampled_from([1, 2, 4, 7]), min_size=1, max_size=3),
        usable=st.integers(8, 40),
        caching=st.booleans() | st.just(True),
    )
    def start(self, windows: list[int | None], usable: int, caching: bool) -> None:
        self.windows, self.caching = windows, caching
        self.kv = KVCacheCoordinator(
            windows, BLOCK, usable + 1, SLOTS, LONGEST, prefix_caching=caching, max_tokens_in_flight=IN_FLIGHT
        )
        self.model = Model(findable=[{} for _ in windows])
        self.resets = 0

    # --- the model's own arithmetic ------------------------------------------------------------------------------

    def caches(self, request: Request) -> bool:
        return self.caching or any(tag == "family" for tag, _ in request.cache_extras)

    def content(self, request: Request, column: int, resets: int) -> Content:
        return request.cache_extras, tuple(tokens_of(request)[: (column + 1) * BLOCK]), resets

    def reads(self, group: int, position: int) -> set[int]:
        """Columns with tokens before `position` that a query there sees."""
        window = self.windows[group]
        first = 0 if window is None else max(position - window + 1, 0)
        return {p // BLOCK for p in range(first, position)}

    def held(self) -> set[int]:
        return {b for seat in self.model.seats.values() for table in seat.tables for b in table.values()}

    def expected_hit(self, request: Request) -> int:
        """Blocks of the longest hit, by trying every length."""
        if not self.caches(request) or request.params.prompt_logprobs is not None:
            return 0
        return max(
            n
            for n in range((request.num_tokens - 1) // BLOCK + 1)
            if all(
                self.content(request, column, self.resets) in findable
                for group, findable in enumerate(self.model.findable)
                for column in self.reads(group, n * BLOCK)
            )
        )

    def take(self, new: tuple[NewBlocks, ...]) -> None:
        """Let the pool's new blocks lose what they held, and put them in the tables."""
        for group, gained in enumerate(new):
            for slot, column, block in zip(
                gained.slots.tolist(), gained.columns.tolist(), gained.block_ids.tolist(), strict=True
            ):
                table = self.model.seats[slot].tables[group]
                assert block not in self.held()
                assert column == max(table, default=column - 1) + 1
                table[column] = block
                old = self.model.contents.pop(block, None)
                for findable in self.model.findable:
                    if old is not None and findable.get(old) == block:
                        del findable[old]

    # --- lives of requests ---------------------------------------------------------------------------------------

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24) | st.integers(1, 24).map(lambda n: [0] * n),
        extras=st.sampled_from([(), (), (("salt", "a"),), (("family", "f"),)]),
        scored=st.integers(0, 7).map(lambda i: 0 if i == 0 else None),
    )
    def arrive(self, prompt: list[int], extras: Extras, scored: int | None) -> None:
        self.model.waiting.append(
            Request(
                request_id="r",
                prompt_token_ids=ids(*prompt),
                params=SamplingParams(prompt_logprobs=scored),
                stop_token_ids=frozenset(),
                max_output_tokens=100,
                seed=0,
                cache_extras=extras,
            )
        )

    @precondition(lambda self: self.model.waiting and len(self.model.seats) < SLOTS)
    @rule(data=st.data())
    def seat(self, data: st.DataObject) -> None:
        request = self.model.waiting.pop(data.draw(st.integers(0, len(self.model.waiting) - 1)))
        slot = data.draw(st.sampled_from(sorted(set(range(SLOTS)) - set(self.model.seats))))
        hit = self.kv.find_prefix(request)
        assert hit.num_tokens == self.expected_hit(request) * BLOCK < request.num_tokens
        held, free, stats = self.held(), self.kv.num_free_blocks, self.kv.prefix_stats
        self.check_growth(request, hit)
        new = self.kv.seat(slot, request, hit)
        tables = [dict(zip(n.columns.tolist(), n.block_ids.tolist(), strict=True)) for n in new]
        found = {b for table in tables for b in table.values()}
        assert all((n.slots == slot).all() for n in new)
        assert free - self.kv.num_free_blocks == hit.num_idle == len(found - held)
        for group, table in enumerate(tables):
            assert set(table) == self.reads(group, hit.num_tokens)
            for column, block in table.items():
                assert self.model.contents[block] == self.content(request, column, self.resets)
        self.model.seats[slot] = Seat(request, self.resets, tables, hit.num_tokens, hit.num_tokens)
        counts = self.caches(request) and request.num_preemptions == 0 and request.params.prompt_logprobs is None
        gained = (request.num_tokens, hit.num_tokens) if counts else (0, 0)
        assert self.kv.prefix_stats == (stats[0] + gained[0], stats[1] + gained[1])

    def check_growth(self, request: Request, hit: PrefixHit) -> None:
        """A request that fits an empty pool is never asked for more, whatever it finds there."""
        most = LONGEST if self.kv.fits(LONGEST) else self.kv.longest
        assert self.kv.growth(hit, min(request.num_tokens, most)) <= max(self.kv.num_blocks, hit.num_idle)

    @precondition(lambda self: self.model.seats)
    @rule(data=st.data(), ahead=st.booleans())
    def step(self, data: st.DataObject, ahead: bool) -> None:
        """Schedule some slots together, as far as they may be in flight."""
        goals = {}
        for slot, seat in self.model.seats.items():
            most = min(seat.request.num_tokens, seat.computed + IN_FLIGHT)
            goals[slot] = data.draw(st.just(most) | st.integers(seat.reached, most))
        slots, goal = ids(*goals), ids(*goals.values())
        known = ids(*(self.model.seats[s].request.num_tokens for s in goals))
        wanted = [
            max(0, -(-(int(k) if ahead and window is None else int(g)) // BLOCK) - max(table, default=empty) - 1)
            for s, g, k in zip(goals, goal, known, strict=True)
            for window, table, empty in self.columns_of(s)
        ]
        free = self.kv.num_free_blocks
        if not ahead:
            assert self.kv.blocks_needed(slots, goal) == sum(wanted)
        new = self.kv.allocate(slots, goal, reserve=known if ahead else None)
        assert (new is None) == (sum(wanted) > free)
        if new is None:
            assert self.kv.num_free_blocks == free
            return
        self.take(new)
        assert free - self.kv.num_free_blocks == sum(wanted) == sum(len(n.block_ids) for n in new)
        for slot, end in goals.items():
            self.compute(self.model.seats[slot], end)

    def columns_of(self, slot: int) -> list[tuple[int | None, dict[int, int], int]]:
        """Each group's window and table, and the column before the first where the table is empty."""
        seat = self.model.seats[slot]
        return [
            (window, table, min(self.reads(group, seat.computed), default=-(-seat.computed // BLOCK)) - 1)
            for group, (window, table) in enumerate(zip(self.windows, seat.tables, strict=True))
        ]

    def compute(self, seat: Seat, end: int) -> None:
        """What the device does: read the columns before, write the step's tokens."""
        for group, table in enumerate(seat.tables):
            for column in self.reads(group, seat.reached) if end > seat.reached else ():
                content = self.model.contents[table[column]]
                here = self.content(seat.request, column, content[2])
                # An unfinished block holds the tokens so far.
                assert content == (here[0], here[1][: seat.reached], here[2])
            for position in range(seat.reached, end):
                block = table[position // BLOCK]
                assert not self.kv.pool.index.findable[block]
                assert sum(block in t.values() for s in self.model.seats.values() for t in s.tables) == 1
                tokens = tuple(tokens_of(seat.request)[: position + 1])
                self.model.contents[block] = (seat.request.cache_extras, tokens, seat.resets)
        seat.reached = end

    @precondition(lambda self: self.model.seats)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        """Steps come back for some slots; whose tokens are all computed gets another."""
        slots = data.draw(
            st.just(sorted(self.model.seats)) | st.lists(st.sampled_from(sorted(self.model.seats)), unique=True)
        )
        computed = []
        for seat in (self.model.seats[s] for s in slots):
            computed.append(data.draw(st.just(seat.reached) | st.integers(seat.computed, seat.reached)))
        self.kv.commit(ids(*slots), ids(*computed))
        # All blocks of the step are published before any leaves its window.
        for slot, end in zip(slots, computed, strict=True):
            self.publish(self.model.seats[slot], end)
        for slot, end in zip(slots, computed, strict=True):
            seat = self.model.seats[slot]
            seat.computed = end
            for group, window in enumerate(self.windows):
                if window is not None:
                    first = max(end - window + 1, 0) // BLOCK
                    seat.tables[group] = {c: b for c, b in seat.tables[group].items() if c >= first}
            if end == seat.request.num_tokens < LONGEST:
                seat.request.output_token_ids.append(data.draw(st.integers(0, 1)))

    def publish(self, seat: Seat, end: int) -> None:
        if not self.caches(seat.request) or seat.resets != self.resets:
            return
        for group, table in enumerate(seat.tables):
            for column in range(seat.computed // BLOCK, end // BLOCK):
                content = self.content(seat.request, column, self.resets)
                assert self.model.contents[table[column]] == content
                self.model.findable[group].setdefault(content, table[column])

    @precondition(lambda self: self.model.waiting and len(self.model.seats) < SLOTS)
    @rule(data=st.data(), steps=st.integers(1, 6))
    def run(self, data: st.DataObject, steps: int) -> None:
        """Several steps of all slots in turn, so that prompts get through."""
        self.seat(data)
        for _ in range(steps):
            self.step(data, ahead=True)
            self.retire(data)

    @precondition(lambda self: self.model.seats)
    @rule(data=st.data(), preempted=st.booleans())
    def leave(self, data: st.DataObject, preempted: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.model.seats)))
        seat = self.model.seats.pop(slot)
        self.kv.free(slot)
        if preempted:
            seat.request.num_preemptions += 1
            self.model.waiting.append(seat.request)

    @rule(sure=st.integers(0, 3))
    def reset(self, sure: int) -> None:
        if sure == 0:
            self.kv.reset_prefix_cache()
            self.resets += 1
            self.model.findable = [{} for _ in self.windows]

    # --- laws ----------------------------------------------------------------------------------------------------

    @invariant()
    def conserved(self) -> None:
        """Free and held are all, always (C24)."""
        assert self.kv.num_free_blocks + len(self.held()) == self.kv.num_blocks
        assert 0 not in self.held()

    @invariant()
    def nothing_is_findable_but_what_was_computed(self) -> None:
        for findable, by_key in zip(self.model.findable, self.kv.pool.index.maps, strict=True):
            assert sorted(findable.values()) == sorted(by_key.values())
            assert all(self.model.contents[block] == content for content, block in findable.items())

    @invariant()
    def window_groups_hold_no_more_than_they_said(self) -> None:
        for seat in self.model.seats.values():
            for manager, table in zip(self.kv.managers, seat.tables, strict=True):
                assert len(table) <= manager.most

    def teardown(self) -> None:
        for slot in range(SLOTS):
            self.kv.free(slot)
        assert self.kv.num_free_blocks == self.kv.num_blocks
        assert sorted(self.kv.pool.allocate(self.kv.num_blocks).tolist()) == list(range(1, self.kv.num_blocks + 1))
        assert len(self.kv.pool.index) == 0


TestCoordinatorMachine = CoordinatorMachine.TestCase
TestCoordinatorMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
