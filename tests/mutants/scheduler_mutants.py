"""What can be wrong with a scheduler: the built-in mechanics as a whole scheduler, or a policy, broken in one way each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from enginebay.interfaces.scheduler import (
    FinishReason,
    Int32Array,
    ModelOutput,
    NewBlocks,
    NewRequest,
    PrefixHit,
    Request,
    RequestOutputDelta,
    RequestStatus,
    SchedulerContext,
    SchedulerOutput,
    SchedulerStats,
    SchedulingPolicy,
)
from enginebay.plugins.records import SchedulerRecord
from enginebay.scheduling.rows import Rows
from enginebay.scheduling.scheduler import TokenBudgetScheduler
from enginebay.scheduling.slots import FINISHED
from enginebay_priority.policy import UrgentFirst
from mutant import Mutant
from pydantic import BaseModel, ConfigDict


class Plain(TokenBudgetScheduler):
    """The built-in mechanics, urgent requests first: nothing is wrong with it."""

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(replace(context, policy=UrgentFirst()))


def scheduler(factory: Callable[[SchedulerContext], Any], **fields: Any) -> SchedulerRecord:
    """A record of a whole scheduler."""
    named: dict[str, Any] = {"name": "mutant", "summary": "a scheduler", "depth": "scheduler", "api_version": 0}
    return SchedulerRecord(factory=factory, **named | fields)


def policy(made: type[SchedulingPolicy], **fields: Any) -> SchedulerRecord:
    """A record of a policy."""
    return scheduler(lambda context: made(), depth="policy", **fields)


ORIGINALS = {"cpu": scheduler(Plain)}


# --- the record and policies


class Weight(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    weight: float = 1.0


class TakesAnything(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class CountsCalls(UrgentFirst):
    """Orders requests by when they were looked at."""

    calls = 0

    def admission_key(self, request: Request) -> tuple[float, ...]:
        self.calls += 1
        return (request.priority, self.calls)


class Ages(UrgentFirst):
    """Requests grow more urgent with time."""

    def admission_key(self, request: Request) -> tuple[float, ...]:
        return (request.priority - 1e-3 * time.monotonic(), request.arrival)


class Demotes(UrgentFirst):
    """Writes a default into the request."""

    def admission_key(self, request: Request) -> tuple[float, ...]:
        request.priority = max(request.priority, 0)
        return super().admission_key(request)


class SortsInPlace(UrgentFirst):
    """Sorts the list of running requests."""

    def choose_victim(self, running: Sequence[Request]) -> Request:
        assert isinstance(running, list)
        running.sort(key=lambda request: (request.priority, request.arrival))
        return super().choose_victim(running)


class TakesTurns(UrgentFirst):
    """Another victim at each call."""

    calls = 0

    def choose_victim(self, running: Sequence[Request]) -> Request:
        self.calls += 1
        return running[self.calls % len(running)]


class EverySecondStep(UrgentFirst):
    """Prompts run in every second step."""

    calls = 0

    def prefill_quota(self, num_decode_rows: int, budget: int) -> int:
        self.calls += 1
        return budget * (self.calls % 2)


class ByAddress(UrgentFirst):
    """Ties between requests of one urgency are settled by address."""

    def admission_key(self, request: Request) -> tuple[float, ...]:
        return (request.priority, id(request))


class ByHash(UrgentFirst):
    """The victim is the first in the order of a set of ids."""

    def choose_victim(self, running: Sequence[Request]) -> Request:
        return min(running, key=lambda request: (-request.priority, hash(request.request_id)))


class NewestFirst(UrgentFirst):
    """Last come, first served."""

    def admission_key(self, request: Request) -> tuple[float, ...]:
        return (request.priority, -request.arrival)


class IgnoresPriority(UrgentFirst):
    """Says that it uses priorities, and does not."""

    def admission_key(self, request: Request) -> tuple[float, ...]:
        return (request.arrival,)

    def may_preempt(self, waiting: Request, victim: Request) -> bool:
        return False


# --- scenes


class WaitsForTokens(Plain):
    """Composes nothing while a step is in flight."""

    def schedule(self) -> SchedulerOutput | None:
        return None if self._in_flight else super().schedule()


class AbortsRunningOnly(Plain):
    """A waiting request is not found by its id."""

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutputDelta]:
        return super().abort([i for i in request_ids if i in self._requests and self._requests[i].slot >= 0])


class CountsByStatus(Plain):
    """Counts those that run by what they say, not by who is in the batch."""

    def stats(self) -> SchedulerStats:
        found = super().stats()
        found.num_running = sum(r.status is RequestStatus.RUNNING for r in self._requests.values())
        return found


class AbortedRunsOn(CountsByStatus):
    """An aborted request's slot stays in the batch for a step."""

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutputDelta]:
        order = self._order
        deltas = super().abort(request_ids)
        self._order = order[np.isin(order, list(self._slots.requests))]
        return deltas


class AbortInFlightLeaks(Plain):
    """The blocks of a request that is aborted with its row in flight stay behind."""

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutputDelta]:
        found = {self._requests[i].slot for i in request_ids if i in self._requests} - {-1}
        for slot in found:
            self._slots.in_flight[slot] += int(self._slots.in_flight[slot] > 0)
        return super().abort(request_ids)


class VictimKeepsItsRow(Plain):
    """Rows composed before a preemption stay as they were (C18)."""

    def _continue_running(self) -> tuple[Rows, tuple[NewBlocks, ...], bool]:
        order, before = self._order, self._num_preemptions
        rows, blocks, short = super()._continue_running()
        if self._num_preemptions > before:
            victim = np.setdiff1d(order, self._order)[:1]
            rows = Rows(
                np.concatenate([victim, rows.slots]),
                np.concatenate([victim * 0 + 1, rows.take]),
                rows.num_decode + 1,
                rows.quota,
            )
        return rows, blocks, short


class DropsTokensOfVictims(Plain):
    """Tokens that come back for a preempted request are thrown away."""

    def _preempt(self, request: Request) -> None:
        slot = request.slot
        super()._preempt(request)
        if request in self._unsettled:
            self._slots.state[slot] = FINISHED


class ForgetsOutputs(Plain):
    """A preempted request begins again at its prompt."""

    def _seat(self, request: Request, hit: PrefixHit, take: int) -> Any:
        new, blocks = super()._seat(request, hit, take)
        if request.num_preemptions:
            new.token_ids = request.prompt_token_ids
        return new, blocks


class LeaksAtEdges(Plain):
    """A stop token that fills a block leaves the next one behind, if a step in flight has it (C24)."""

    def _end(self, request: Request, reason: FinishReason) -> int | None:
        slot = request.slot
        if reason == "stop" and request.num_tokens % 4 == 0 and slot >= 0:
            self._slots.in_flight[slot] += 1
        return super()._end(request, reason)


class SendsTheEldestBack(Plain):
    """The longest-serving request gives way."""

    def _choose_victim(self) -> Request:
        return min(self._running(), key=self._keys.__getitem__)


# --- lives


class PrefillsFirst(Plain):
    """Rows of new requests come before the others."""

    def _commit(self, rows: Rows, new: list[NewRequest], blocks: tuple[NewBlocks, ...]) -> SchedulerOutput:
        turn = -len(new) if new else 0
        turned = Rows(np.roll(rows.slots, -turn), np.roll(rows.take, -turn), rows.num_decode, rows.quota)
        return super()._commit(turned, new, blocks)


class CountsWithThePrompt(Plain):
    """The sampler's counter starts at the prompt's length."""

    def _commit(self, rows: Rows, new: list[NewRequest], blocks: tuple[NewBlocks, ...]) -> SchedulerOutput:
        output = super()._commit(rows, new, blocks)
        output.output_index = output.output_index + self._slots.num_prompt[output.slots]
        return output


class StoppedRunsOn(CountsByStatus):
    """A request that a token stopped stays in the batch for one more step."""

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(context)
        self._late: set[int] = set()

    def _settle(self, slots: Int32Array) -> None:
        requests = self._slots.requests
        stopped = {s for s in slots.tolist() if s in requests and requests[s].finish_reason == "stop"}
        due = (set(slots.tolist()) - stopped) | (self._late & set(requests))
        self._late = stopped - due
        super()._settle(np.array(sorted(due), dtype=np.int32))


class BudgetPlusOne(Plain):
    """One token too many."""

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(context)
        self._budget += 1


class FloodsPrompts(Plain):
    """Prompts beside decode rows take all that is left."""

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(replace(context, max_prefill_tokens=None))


class SlotsFromOne(Plain):
    """Slots are counted from 1 on the wire."""

    def schedule(self) -> SchedulerOutput | None:
        output = super().schedule()
        if output is not None:
            output.slots = output.slots + 1
            for new in output.new_requests:
                new.slot += 1
            output.new_blocks = tuple(replace(blocks, slots=blocks.slots + 1) for blocks in output.new_blocks)
        return output

    def update(self, output: SchedulerOutput, result: ModelOutput) -> list[RequestOutputDelta]:
        return super().update(replace(output, slots=output.slots - 1), result)


class OneStepMore(Plain):
    """A step too many in flight."""

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(replace(context, max_concurrent_batches=context.max_concurrent_batches + 1))


class ForgetsBlocks(Plain):
    """Blocks that running requests gain are not told in a step that also admits."""

    def _admit(self, rows: Rows, blocks: tuple[NewBlocks, ...]) -> tuple[list[NewRequest], tuple[NewBlocks, ...]]:
        nothing = tuple(NewBlocks(b.slots[:0], b.columns[:0], b.block_ids[:0]) for b in blocks)
        new, joined = super()._admit(rows, nothing)
        return (new, joined) if new else (new, blocks)


class FreesInFlight(Plain):
    """Blocks come back when a request ends, whatever is in flight."""

    def _settle(self, slots: Int32Array) -> None:
        flying = self._slots.in_flight.copy()
        self._slots.in_flight[slots] = 0
        super()._settle(slots)
        self._slots.in_flight[:] = flying


class PublishesAtOnce(Plain):
    """Blocks can be found as soon as their step is composed."""

    def _commit(self, rows: Rows, new: list[NewRequest], blocks: tuple[NewBlocks, ...]) -> SchedulerOutput:
        output = super()._commit(rows, new, blocks)
        self._kv.commit(output.slots, output.num_computed_tokens + output.num_scheduled_tokens)
        return output


class SkipsAfterPreemption(Plain):
    """In the step of a preemption only the first row is kept (C19)."""

    def _continue_running(self) -> tuple[Rows, tuple[NewBlocks, ...], bool]:
        before = self._num_preemptions
        rows, blocks, short = super()._continue_running()
        if self._num_preemptions > before:
            rows = rows.keep(np.arange(len(rows.slots)) < 1)
        return rows, blocks, short


class BackOfTheQueue(Plain):
    """A preempted request queues behind those who came since."""

    def _preempt(self, request: Request) -> None:
        key, arrival, _ = self._keys[request]
        self._keys[request] = ((*key[:1], key[1] + 1000), arrival, self._num_added)
        self._num_added += 1
        super()._preempt(request)


class QueuesTheImpossible(Plain):
    """What exceeds the pool is queued (C21)."""

    def admission_error(self, request: Request) -> str | None:
        error = super().admission_error(request)
        return None if error and "whole KV cache" in error else error


class WantsASpareBlock(Plain):
    """Refuses what would fill the pool exactly."""

    def admission_error(self, request: Request) -> str | None:
        whole = request.num_prompt_tokens + request.max_output_tokens
        spare = "no block would be spare" if not self._kv.fits(whole) else None
        return super().admission_error(request) or spare


class KeepsStatus(Plain):
    """A finished request still says that it runs."""

    def _end(self, request: Request, reason: FinishReason) -> int | None:
        status = request.status
        slot = super()._end(request, reason)
        request.status = status
        return slot


class SilentAborts(Plain):
    """The delta of an abort does not say when the request began."""

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutputDelta]:
        return [replace(delta, num_cached_tokens=None) for delta in super().abort(request_ids)]


class ForgetsVictims(Plain):
    """Preempted requests are in no count."""

    def stats(self) -> SchedulerStats:
        found = super().stats()
        found.num_waiting -= sum(r.status is RequestStatus.PREEMPTED for r in self._requests.values())
        return found


class DoneInFlight(Plain):
    """Says that nothing is unfinished while the last step is out."""

    def has_unfinished(self) -> bool:
        return bool(self._requests)


class IgnoresStops(Plain):
    """Stop tokens are not looked at."""

    def update(self, output: SchedulerOutput, result: ModelOutput) -> list[RequestOutputDelta]:
        self._slots.stop_ids[:] = -1
        return super().update(output, result)


class SwapsTokens(Plain):
    """Two requests of a step of three get each other's tokens."""

    def update(self, output: SchedulerOutput, result: ModelOutput) -> list[RequestOutputDelta]:
        deltas = super().update(output, result)
        if len(deltas) > 2:
            deltas[0].new_token_ids, deltas[1].new_token_ids = deltas[1].new_token_ids, deltas[0].new_token_ids
        return deltas


class LeaksShortRequests(Plain):
    """A request that ends with its first token keeps its blocks."""

    def _end(self, request: Request, reason: FinishReason) -> int | None:
        if request.max_output_tokens == 1 and request.slot >= 0:
            self._slots.in_flight[request.slot] += 1
        return super()._end(request, reason)


class FreesTwice(Plain):
    """Blocks are given back a second time."""

    def _settle(self, slots: Int32Array) -> None:
        before = set(self._slots.requests)
        super()._settle(slots)
        for slot in before - set(self._slots.requests):
            self._kv.free(slot)


class WantsTwiceItsBlocks(Plain):
    """A request waits until twice its blocks are free, which may be never (C22)."""

    def _admit(self, rows: Rows, blocks: tuple[NewBlocks, ...]) -> tuple[list[NewRequest], tuple[NewBlocks, ...]]:
        first = self._waiting.peek()
        if first is not None:
            whole = first.num_prompt_tokens + first.max_output_tokens - 1
            if 2 * self._kv.growth(self._kv.find_prefix(first), whole) > self._kv.num_blocks:
                return [], blocks
        return super()._admit(rows, blocks)


FACTORY, OPTIONS = "factory_gives_what_the_record_says", "every_option_is_read"
KEYS, VICTIMS, QUOTAS = "admission_keys_are_pure", "victims_are_pure", "quotas_are_pure"
AGAIN, ABORT, PREEMPTED = (
    "the_same_again_gives_the_same_schedule",
    "abort_ends_a_request_in_every_state",
    "a_preempted_request_loses_nothing",
)
RETIREMENT = "nothing_is_returned_or_published_before_its_step_retires"
MUTANTS = [
    Mutant(
        "returns_a_policy", "a whole scheduler's factory returns a policy", FACTORY, scheduler(lambda _: UrgentFirst())
    ),
    Mutant(
        "ignores_an_option", "an option is accepted and read by nobody", OPTIONS, policy(UrgentFirst, options=Weight)
    ),
    Mutant(
        "takes_any_option", "options that there are not are accepted", OPTIONS, scheduler(Plain, options=TakesAnything)
    ),
    *(
        Mutant(name, fault, law, policy(made))
        for name, fault, law, made in (
            ("counts_calls", "admission keys depend on how often they were asked for", KEYS, CountsCalls),
            ("ages", "admission keys depend on the clock", KEYS, Ages),
            ("demotes", "the policy changes a request's priority", KEYS, Demotes),
            ("sorts_in_place", "the policy sorts the list of running requests", VICTIMS, SortsInPlace),
            ("takes_turns", "victims are chosen in turn", VICTIMS, TakesTurns),
            ("every_second_step", "the prefill quota alternates", QUOTAS, EverySecondStep),
            ("by_address", "ties are settled by where a request lies in memory", AGAIN, ByAddress),
            ("by_hash", "victims are chosen in the order of a set", AGAIN, ByHash),
            ("newest_first", "the last to come is served first", "equals_keep_their_order", NewestFirst),
            (
                "ignores_priority",
                "priorities are accepted and ignored",
                "priority_is_honoured_or_refused",
                IgnoresPriority,
            ),
        )
    ),
    *(
        Mutant(name, fault, law, scheduler(made))
        for name, fault, law, made in (
            (
                "waits_for_tokens",
                "asynchronous scheduling is declared, and nothing is composed while a step is in flight",
                "steps_in_flight_take_placeholders",
                WaitsForTokens,
            ),
            ("aborts_running_only", "a waiting request cannot be aborted", ABORT, AbortsRunningOnly),
            ("aborted_runs_on", "an aborted request is scheduled again", ABORT, AbortedRunsOn),
            ("abort_in_flight_leaks", "an abort with a row in flight loses blocks", ABORT, AbortInFlightLeaks),
            (
                "victim_keeps_its_row",
                "a victim stays in the step that it was preempted in",
                PREEMPTED,
                VictimKeepsItsRow,
            ),
            ("drops_tokens_of_victims", "a victim's tokens in flight are thrown away", PREEMPTED, DropsTokensOfVictims),
            ("forgets_outputs", "a preempted request begins again at its prompt", PREEMPTED, ForgetsOutputs),
            (
                "leaks_at_edges",
                "a stop token that fills a block, with a step in flight, loses blocks",
                "an_end_at_a_block_edge_returns_every_block",
                LeaksAtEdges,
            ),
            ("sends_the_eldest_back", "the first to come gives way", "equals_keep_their_order", SendsTheEldestBack),
            ("prefills_first", "new requests' rows come before the others", "steps_are_well_formed", PrefillsFirst),
            (
                "counts_with_the_prompt",
                "the output index counts the prompt",
                "steps_are_well_formed",
                CountsWithThePrompt,
            ),
            ("stopped_runs_on", "a stopped request has one more row", "only_running_requests_have_rows", StoppedRunsOn),
            ("budget_plus_one", "a step is one token too long", "steps_keep_to_the_token_budget", BudgetPlusOne),
            ("floods_prompts", "max_prefill_tokens is ignored", "steps_keep_to_the_token_budget", FloodsPrompts),
            ("slots_from_one", "slots are counted from 1", "seats_are_bounded", SlotsFromOne),
            ("one_step_more", "one step too many is in flight", "steps_in_flight_are_bounded", OneStepMore),
            (
                "forgets_blocks",
                "a running request's new block is not told",
                "blocks_cover_what_is_computed",
                ForgetsBlocks,
            ),
            ("frees_in_flight", "blocks come back before the step naming them retires", RETIREMENT, FreesInFlight),
            ("publishes_at_once", "blocks can be found before they are computed", RETIREMENT, PublishesAtOnce),
            (
                "skips_after_preemption",
                "others sit out the step of a preemption",
                "nobody_is_skipped",
                SkipsAfterPreemption,
            ),
            ("back_of_the_queue", "a preempted request loses its seniority", "nobody_is_overtaken", BackOfTheQueue),
            (
                "queues_the_impossible",
                "a request larger than the pool is queued",
                "what_can_never_run_is_refused",
                QueuesTheImpossible,
            ),
            (
                "wants_a_spare_block",
                "a request that fits exactly is refused",
                "what_can_never_run_is_refused",
                WantsASpareBlock,
            ),
            ("keeps_status", "a finished request says that it runs", "requests_are_kept_up_to_date", KeepsStatus),
            (
                "silent_aborts",
                "an abort's delta says nothing of the cache",
                "requests_are_kept_up_to_date",
                SilentAborts,
            ),
            ("forgets_victims", "preempted requests are in no count", "stats_are_true", ForgetsVictims),
            ("done_in_flight", "nothing is unfinished though a step is out", "stats_are_true", DoneInFlight),
            ("ignores_stops", "stop tokens are not looked at", "everybody_gets_its_own_tokens", IgnoresStops),
            ("swaps_tokens", "two requests get each other's tokens", "everybody_gets_its_own_tokens", SwapsTokens),
            (
                "leaks_short_requests",
                "a request of one token keeps its blocks",
                "every_block_comes_back",
                LeaksShortRequests,
            ),
            ("frees_twice", "blocks are given back twice", "every_block_comes_back", FreesTwice),
            (
                "wants_twice_its_blocks",
                "a request waits for blocks that there are not",
                "everybody_ends",
                WantsTwiceItsBlocks,
            ),
        )
    ),
]
