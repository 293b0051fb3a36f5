"""The in-tree policies pass the suite that every author runs, and so do a policy and a whole scheduler unlike them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from enginebay.conformance import SchedulerConformance
from enginebay.errors import RequestError, RequestTooLargeError
from enginebay.interfaces.scheduler import (
    ModelOutput,
    NewRequest,
    Request,
    RequestOutputDelta,
    RequestStatus,
    Scheduler,
    SchedulerContext,
    SchedulerOutput,
    SchedulerStats,
    SchedulingPolicy,
)
from enginebay.plugins.records import SchedulerRecord
from pydantic import BaseModel, ConfigDict


class TestFcfs(SchedulerConformance):
    plugin = "fcfs"


class TestPriority(SchedulerConformance):
    plugin = "priority"


class Shares(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt_share: float = 0.5


class ShortestFirst(SchedulingPolicy):
    """Short jobs first, at the price of long ones; prompts get a share of each step."""

    def __init__(self, share: float) -> None:
        self.share = share

    def admission_key(self, request: Request) -> tuple[float, ...]:
        return (request.num_prompt_tokens + request.max_output_tokens, request.arrival)

    def choose_victim(self, running: Sequence[Request]) -> Request:
        return max(running, key=lambda r: (r.max_output_tokens - len(r.output_token_ids), r.arrival))

    def prefill_quota(self, num_decode_rows: int, budget: int) -> int:
        return int(budget * self.share) if num_decode_rows else budget


class OneAtATime(Scheduler):
    """No batching at all: a request has the engine for itself until it ends."""

    def __init__(self, context: SchedulerContext) -> None:
        self.context = context
        self.requests: dict[str, Request] = {}
        self.current: Request | None = None
        #: tokens known, placeholders included; tokens computed; tokens known when it was seated
        self.known = self.computed = self.prefill = 0
        #: whether slot 0 holds blocks, also those of a request that has ended
        self.taken = False
        self.flying: deque[tuple[SchedulerOutput, Request]] = deque()
        self.steps = 0

    def add(self, request: Request) -> None:
        c, name = self.context, request.request_id
        if request.priority:
            raise RequestError(f"request {name}: priorities are not looked at")
        whole = request.num_prompt_tokens + request.max_output_tokens
        uncut = not c.chunked_prefill and request.num_prompt_tokens > c.max_num_batched_tokens
        if whole > c.max_model_len or not c.kv.fits(whole - 1) or uncut:
            raise RequestTooLargeError(f"request {name}: {whole} tokens are too many")
        self.requests[name] = request

    def schedule(self) -> SchedulerOutput | None:
        if len(self.flying) >= self.context.max_concurrent_batches:
            return None
        new, blocks = [], []
        if self.current is None:
            if self.taken or not self.requests:
                return None
            seated = self.current = next(iter(self.requests.values()))
            hit = self.context.kv.find_prefix(seated)
            seated.status, seated.slot, self.taken = RequestStatus.RUNNING, 0, True
            seated.first_scheduled, seated.num_cached_tokens = time.monotonic(), hit.num_tokens
            self.known = self.prefill = seated.num_tokens
            self.computed = hit.num_tokens
            blocks.append(self.context.kv.seat(0, seated, hit))
            prompt, params, seed, stops = seated.prompt_token_ids, seated.params, seated.seed, seated.stop_token_ids
            size = seated.num_prompt_tokens
            new = [NewRequest(seated.request_id, 0, prompt, size, hit.num_tokens, params, seed, stops)]
        request = self.current
        computable = request.num_prompt_tokens + request.max_output_tokens - 1
        take = min(self.known, computable) - self.computed
        take = min(take, self.context.max_num_batched_tokens)
        if take < 1:
            return None
        one, reach = np.zeros(1, np.int32), np.array([self.computed + take], np.int32)
        gained = self.context.kv.allocate(one, reach)
        assert gained is not None
        blocks.append(gained)
        output = SchedulerOutput(
            step=self.steps,
            new_requests=new,
            slots=one,
            num_scheduled_tokens=np.array([take], np.int32),
            num_computed_tokens=np.array([self.computed], np.int32),
            num_decode_rows=int(self.computed >= self.prefill),
            samples=reach == self.known,
            output_index=np.array([self.known - request.num_prompt_tokens], np.int32),
            new_blocks=tuple(first.joined(*rest) for first, *rest in zip(*blocks, strict=True)),
        )
        self.computed += take
        self.known += int(output.samples[0])
        self.steps += 1
        self.flying.append((output, request))
        return output

    def update(self, output: SchedulerOutput, result: ModelOutput) -> list[RequestOutputDelta]:
        _, request = self.flying.popleft()
        deltas = []
        if request is self.current and output.samples[0]:
            token = int(result.token_ids[0, 0])
            delta = RequestOutputDelta(request.request_id, [token])
            if not request.output_token_ids:
                self.introduce(request, delta)
            request.output_token_ids.append(token)
            deltas.append(delta)
            if token in request.stop_token_ids:
                delta.finish_reason, delta.stop_token_id = "stop", token
            elif len(request.output_token_ids) == request.max_output_tokens:
                delta.finish_reason = "length"
            if delta.finish_reason:
                self.end(request, delta)
        self.context.kv.commit(output.slots, output.num_computed_tokens + output.num_scheduled_tokens)
        self.settle()
        return deltas

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutputDelta]:
        deltas = []
        for name in request_ids:
            if name in self.requests:
                request, delta = self.requests[name], RequestOutputDelta(name, [], "abort")
                if not request.output_token_ids:
                    self.introduce(request, delta)
                self.end(request, delta)
                deltas.append(delta)
        self.settle()
        return deltas

    def introduce(self, request: Request, delta: RequestOutputDelta) -> None:
        delta.first_scheduled, delta.num_cached_tokens = request.first_scheduled, request.num_cached_tokens

    def end(self, request: Request, delta: RequestOutputDelta) -> None:
        del self.requests[request.request_id]
        request.status, request.slot, request.finish_reason = RequestStatus.FINISHED, -1, delta.finish_reason
        if request is self.current:
            self.current = None

    def settle(self) -> None:
        if self.taken and self.current is None and not self.flying:
            self.context.kv.free(0)
            self.taken = False

    def has_unfinished(self) -> bool:
        return bool(self.requests or self.flying)

    def stats(self) -> SchedulerStats:
        kv, running = self.context.kv, int(self.current is not None)
        queries, hits = kv.prefix_stats
        return SchedulerStats(
            num_waiting=len(self.requests) - running,
            num_running=running,
            num_in_flight_steps=len(self.flying),
            num_free_blocks=kv.num_free_blocks,
            num_blocks=kv.num_blocks,
            num_prefix_queries=queries,
            num_prefix_hits=hits,
        )


class TestAnotherPolicy(SchedulerConformance):
    @classmethod
    def load_record(cls) -> tuple[Any, Any]:
        def make(context: SchedulerContext) -> ShortestFirst:
            assert isinstance(context.options, Shares)
            return ShortestFirst(context.options.prompt_share)

        return SchedulerRecord(
            name="shortest", summary="shortest first", factory=make, api_version=0, options=Shares
        ), None


class TestAWholeScheduler(SchedulerConformance):
    @classmethod
    def load_record(cls) -> tuple[Any, Any]:
        return SchedulerRecord(
            name="one", summary="one at a time", factory=OneAtATime, api_version=0, depth="scheduler"
        ), None
