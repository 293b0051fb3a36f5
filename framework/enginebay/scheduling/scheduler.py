"""The default scheduler: one token budget a step, and every request's computed tokens chase its known ones.

There is no prefill phase and no decode phase. A request has `num_tokens` (known ones, and a placeholder for each token
in flight) and `num_computed`; a step gives it what is missing, as far as the budget goes. Chunked prefill, asynchronous
steps and recompute after preemption all follow from that. It knows slots, counts and blocks; it does not know tensors,
text, or how a step is run. The order of requests is the policy's.

Three laws
----------
* Blocks and slots come back only when the last step that names them has retired.
* The running request with the smallest admission key is never preempted for blocks, so somebody always ends.
* A steady decode step runs no Python per request in `schedule`, and only what an output costs in `update`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

import numpy as np

from enginebay.errors import ConfigError, PluginError, RequestError, RequestTooLargeError
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
    Scheduler,
    SchedulerContext,
    SchedulerOutput,
    SchedulerStats,
    SchedulingPolicy,
)
from enginebay.scheduling.delivery import Delivery, ended_early
from enginebay.scheduling.headroom import Headroom
from enginebay.scheduling.rows import Rows, compose, joined
from enginebay.scheduling.slots import ACTIVE, FINISHED, PREEMPTED, SlotTable
from enginebay.scheduling.waiting import AdmissionKey, WaitingQueue


class TokenBudgetScheduler(Scheduler):
    """Continuous batching under one token budget, steered by a `SchedulingPolicy`.

    Raises
    ------
    ConfigError
        The context has no policy.
    """

    def __init__(self, context: SchedulerContext) -> None:
        if context.policy is None:
            raise ConfigError("scheduler.policy: the built-in scheduler needs a policy; name one, e.g. fcfs")
        self.context = context
        self._policy: SchedulingPolicy = context.policy
        self._kv = context.kv
        self._budget = context.max_num_batched_tokens
        self._slots = SlotTable(context.max_num_seqs)
        self._delivery = Delivery(self._slots)
        self._waiting = WaitingQueue()
        self._headroom = Headroom()
        # Most policies let nobody be displaced for a seat: then it need not be asked each step.
        self._displaces = type(self._policy).may_preempt is not SchedulingPolicy.may_preempt
        #: slots that run, in order of admission
        self._order: Int32Array = np.zeros(0, dtype=np.int32)
        self._requests: dict[str, Request] = {}
        self._keys: dict[Request, AdmissionKey] = {}
        #: preempted requests that steps in flight still name, and their former slots
        self._unsettled: dict[Request, int] = {}
        self._in_flight: deque[SchedulerOutput] = deque()
        self._num_added = 0
        self._num_steps = 0
        self._num_preemptions = 0

    # --- requests ----------------------------------------------------------------------------------------------------

    def admission_error(self, request: Request) -> str | None:
        """Why `request` could never run, or None. `add` refuses such a request."""
        name, prompt, outputs = request.request_id, request.num_prompt_tokens, request.max_output_tokens
        limit = self.context.max_model_len
        if prompt < 1:
            return f"request {name}: the prompt is empty; give at least one token"
        if outputs < 1 or prompt + outputs > limit:
            return (
                f"request {name}: a prompt of {prompt} tokens and {outputs} output tokens do not fit "
                f"max_model_len={limit}; shorten the prompt, lower max_tokens, or raise max_model_len"
            )
        if not self.context.chunked_prefill and prompt > self._budget:
            return (
                f"request {name}: a prompt of {prompt} tokens exceeds scheduler.max_num_batched_tokens={self._budget} "
                "and scheduler.chunked_prefill is off; shorten the prompt, raise the limit, or switch chunking on"
            )
        if not self._kv.fits(prompt + outputs - 1):
            return (
                f"request {name}: {prompt} prompt and {outputs} output tokens exceed the whole KV cache of "
                f"{self._kv.num_blocks} blocks; shorten the prompt, lower max_tokens, or give the cache more memory"
            )
        return None

    def add(self, request: Request) -> None:
        """Queue `request`; a `RequestError` if its id is in use, `RequestTooLargeError` if it could never run."""
        if request.request_id in self._requests:
            raise RequestError(f"request {request.request_id}: a request with this id is unfinished; use another id")
        if request.priority != 0 and not self._policy.uses_priority:
            raise RequestError(
                f"request {request.request_id}: priority={request.priority} would be ignored, since the scheduling policy "
                "orders requests otherwise; leave it at 0, or set scheduler.policy: priority"
            )
        error = self.admission_error(request)
        if error is not None:
            raise RequestTooLargeError(error)
        key = (self._policy.admission_key(request), request.arrival, self._num_added)
        self._num_added += 1
        self._requests[request.request_id] = request
        self._keys[request] = key
        self._waiting.push(key, request)

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutputDelta]:
        """End requests in whatever state they are; unknown or finished ids are ignored."""
        deltas, seated = [], []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            slot = self._end(request, "abort")
            if slot is not None:
                seated.append(slot)
            deltas.append(ended_early(request, "abort"))
        self._settle(np.array(seated, dtype=np.int32))
        return deltas

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs, or a step is in flight."""
        return bool(self._requests or self._in_flight)

    def stats(self) -> SchedulerStats:
        """Counters as of now."""
        queries, hits = self._kv.prefix_stats
        return SchedulerStats(
            num_waiting=len(self._waiting),
            num_running=len(self._order),
            num_in_flight_steps=len(self._in_flight),
            num_free_blocks=self._kv.num_free_blocks,
            num_blocks=self._kv.num_blocks,
            num_preemptions=self._num_preemptions,
            num_prefix_queries=queries,
            num_prefix_hits=hits,
        )

    # --- a step goes out ---------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """Compose the next step: running requests first, then waiting ones in the policy's order."""
        if len(self._in_flight) >= self.context.max_concurrent_batches:
            return None
        if self._displaces:
            self._yield_seat()
        rows, blocks, short = self._continue_running()
        self._headroom.step()
        # Who was admitted when blocks are short would be the next victim.
        new, blocks = ([], blocks) if short else self._admit(rows, blocks)
        if not len(rows.slots):
            return None
        return self._commit(rows, new, blocks)

    def _commit(self, rows: Rows, new: list[NewRequest], blocks: tuple[NewBlocks, ...]) -> SchedulerOutput:
        """Move the rows' requests forward and put the step among those in flight."""
        t, slots = self._slots, rows.slots
        computed, known = t.num_computed[slots], t.num_tokens[slots]
        reached = computed + rows.take
        samples = reached == known
        output = SchedulerOutput(
            step=self._num_steps,
            new_requests=new,
            slots=slots,
            num_scheduled_tokens=rows.take,
            num_computed_tokens=computed,
            num_decode_rows=rows.num_decode,
            samples=samples,
            output_index=known - t.num_prompt[slots],
            new_blocks=blocks,
        )
        t.num_computed[slots] = reached
        t.num_tokens[slots] = known + samples
        t.in_flight[slots] += 1
        self._num_steps += 1
        self._in_flight.append(output)
        return output

    def _prefill_quota(self, num_decode: int) -> int:
        """Prompt tokens that the policy lets a step take; where nothing decodes it cannot stop the engine."""
        left = self._budget - num_decode
        quota = min(max(self._policy.prefill_quota(num_decode, left), 0), left)
        if num_decode == 0:
            return max(quota, 1) if self.context.chunked_prefill else left
        most = self.context.max_prefill_tokens
        return quota if most is None else min(quota, most)

    def _continue_running(self) -> tuple[Rows, tuple[NewBlocks, ...], bool]:
        """Rows of the running requests with their blocks, and whether blocks were short.

        While blocks are on their way back, rows without any sit this step out; otherwise victims give theirs up until
        the rest has enough. Rows hold nothing before `allocate` succeeds, so composing again unwinds a victim's share.
        """
        t, short = self._slots, False
        rows = compose(t, self._order, self._budget, self._prefill_quota)
        while True:
            goal = t.num_computed[rows.slots] + rows.take
            blocks = self._kv.allocate(rows.slots, goal)
            if blocks is not None:
                return rows, blocks, short
            short = True
            if self._blocks_returning():
                needed = self._kv.blocks_needed_by_row(rows.slots, goal)
                kept = (needed == 0) | (np.cumsum(needed) <= self._kv.num_free_blocks)
                rows = rows.keep(kept)
            else:
                self._preempt(self._choose_victim())
                self._headroom.grow()
                rows = compose(t, self._order, self._budget, self._prefill_quota)

    def _blocks_returning(self) -> bool:
        """Whether a step in flight, once retired, is certain to give blocks back."""
        t, order = self._slots, self._order
        # A request with a placeholder for its last output ends by length at the latest.
        return len(t.requests) > len(order) or bool((t.num_tokens[order] > t.num_computable[order]).any())

    # --- preemption --------------------------------------------------------------------------------------------------

    def _running(self) -> list[Request]:
        """Running requests in order of admission."""
        return [self._slots.requests[slot] for slot in self._order.tolist()]

    def _choose_victim(self) -> Request:
        """The policy's choice among all running requests but the most senior one."""
        running = self._running()
        running.remove(min(running, key=self._keys.__getitem__))
        if not running:
            raise RuntimeError("scheduler: the only running request is short of blocks, though it was found to fit")
        return self._checked(self._policy.choose_victim(running), running)

    def _checked(self, victim: Request, running: list[Request]) -> Request:
        """Refuse a victim that the policy was not offered."""
        if victim not in running:
            raise PluginError(
                f"scheduling policy {type(self._policy).__name__}: choose_victim returned "
                f"{getattr(victim, 'request_id', victim)!r}, none of the running requests that it was given"
            )
        return victim

    def _yield_seat(self) -> None:
        """If the first in the queue cannot be seated, let the policy say whether somebody gives way; one a step."""
        first = self._waiting.peek()
        if first is None or first in self._unsettled or not len(self._order) or self._blocks_returning():
            return
        if self._slots.num_free:
            growth = self._kv.growth(self._kv.find_prefix(first), self._wanted_tokens(first))
            if growth + self._reserve() <= self._kv.num_free_blocks:
                return
        running = self._running()
        victim = self._checked(self._policy.choose_victim(running), running)
        # Only the more urgent may displace, or two requests could displace each other for ever.
        if self._keys[first] < self._keys[victim] and self._policy.may_preempt(first, victim):
            self._preempt(victim)

    def _preempt(self, request: Request) -> None:
        """Send a running request back to the queue. Tokens in flight stay valid; its blocks come back after them."""
        slot = request.slot
        request.status = RequestStatus.PREEMPTED
        request.slot = -1
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._slots.state[slot] = PREEMPTED
        self._unsettled[request] = slot
        self._waiting.push(self._keys[request], request)
        self._settle(np.array([slot], dtype=np.int32))

    # --- admission ---------------------------------------------------------------------------------------------------

    def _admit(self, rows: Rows, blocks: tuple[NewBlocks, ...]) -> tuple[list[NewRequest], tuple[NewBlocks, ...]]:
        """Seat waiting requests while seats, quota and blocks last, and append their rows to `rows`.

        A request starts behind what the prefix cache holds of it, and waits while somebody computes what comes next of it. It
        is given the blocks of all its known tokens at once: a prompt that has begun can be finished. Nobody overtakes the
        first in the queue.
        """
        new: list[NewRequest] = []
        takes: list[int] = []
        gained = [blocks]
        reserve: int | None = None
        while rows.quota > 0 and self._slots.num_free:
            request = self._waiting.peek()
            if request is None or request in self._unsettled:
                break
            hit = self._kv.find_prefix(request)
            if hit.pending:
                break
            want = request.num_tokens - hit.num_tokens
            # Without chunking only a resumed request that outgrew the budget is cut: it could not resume otherwise.
            if not self.context.chunked_prefill and rows.quota < want <= self._budget:
                break
            reserve = self._reserve() if reserve is None else reserve
            growth = self._kv.growth(hit, self._wanted_tokens(request))
            free = self._kv.num_free_blocks
            if growth + reserve > free:
                break
            take = min(want, rows.quota)
            new_request, own = self._seat(request, hit, take)
            new.append(new_request)
            gained += own
            takes.append(take)
            rows.quota -= take
            reserve += growth - (free - self._kv.num_free_blocks)
        if new:
            seats = [n.slot for n in new]
            self._order = np.concatenate([self._order, np.array(seats, dtype=np.int32)])
            rows.append(seats, takes)
            blocks = joined(gained)
        return new, blocks

    def _seat(
        self, request: Request, hit: PrefixHit, take: int
    ) -> tuple[NewRequest, tuple[tuple[NewBlocks, ...], tuple[NewBlocks, ...]]]:
        """Move the first in the queue to a slot: the hit's blocks, then new ones for all its known tokens."""
        self._waiting.discard(request)
        slot = self._slots.seat(request, hit.num_tokens)
        request.status = RequestStatus.RUNNING
        if request.first_scheduled is None:
            request.first_scheduled = time.monotonic()
            request.num_cached_tokens = hit.num_tokens
        found = self._kv.seat(slot, request, hit)
        one = np.array([slot], dtype=np.int32)
        reach = np.array([hit.num_tokens + take], dtype=np.int32)
        blocks = self._kv.allocate(one, reach, np.array([request.num_tokens], dtype=np.int32))
        if blocks is None:
            raise RuntimeError(f"scheduler: no blocks for request {request.request_id}, though enough were free")
        outputs = np.array(request.output_token_ids, dtype=np.int32)
        return NewRequest(
            request_id=request.request_id,
            slot=slot,
            token_ids=np.concatenate([request.prompt_token_ids, outputs], dtype=np.int32),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=hit.num_tokens,
            params=request.params,
            seed=request.seed,
            stop_token_ids=request.stop_token_ids,
            bad_words=request.bad_words,
        ), (found, blocks)

    def _reserve(self) -> int:
        """Blocks that the running requests may want soon."""
        t, order = self._slots, self._order
        soon = np.minimum(t.num_tokens[order] + self._headroom.tokens, t.num_computable[order])
        return self._kv.blocks_needed(order, soon)

    def _wanted_tokens(self, request: Request) -> int:
        """Tokens that a waiting request must have room for to be seated: the known ones and headroom."""
        computable = request.num_prompt_tokens + request.max_output_tokens - 1
        return min(request.num_tokens + self._headroom.tokens, computable)

    # --- a step comes back -------------------------------------------------------------------------------------------

    def update(self, output: SchedulerOutput, result: ModelOutput) -> list[RequestOutputDelta]:
        """Retire the oldest step in flight; rows of requests that ended meanwhile are dropped."""
        if not self._in_flight or self._in_flight[0].step != output.step:
            raise RuntimeError(f"scheduler: step {output.step} came back, but it is not the oldest in flight")
        self._in_flight.popleft()
        t = self._slots
        t.in_flight[output.slots] -= 1
        delivered = self._delivery.deliver(output, result)
        for request, reason in delivered.ended:
            self._end(request, reason)
        self._kv.commit(output.slots, output.num_computed_tokens + output.num_scheduled_tokens)
        self._settle(output.slots)
        return delivered.deltas

    def _end(self, request: Request, reason: FinishReason) -> int | None:
        """Finish a request in any state; returns the slot that is to be settled, if it has one."""
        slot = self._unsettled.get(request, request.slot)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.slot = -1
        self._waiting.discard(request)
        del self._requests[request.request_id], self._keys[request]
        if slot < 0:
            return None
        self._slots.state[slot] = FINISHED
        return slot

    def _settle(self, slots: Int32Array) -> None:
        """Take slots that left the batch out of the order, and free those that no step in flight names any more."""
        t = self._slots
        leaving = slots[t.state[slots] > ACTIVE]
        if not len(leaving):
            return
        self._order = self._order[t.state[self._order] == ACTIVE]
        for slot in leaving[t.in_flight[leaving] == 0].tolist():
            self._kv.free(slot)
            self._unsettled.pop(t.vacate(slot), None)
