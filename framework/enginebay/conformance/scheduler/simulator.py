"""A scheduler with its cache and its clients, run on the simulated device: every step and every delta is checked.

`Simulator` makes requests, keeps steps in flight, hands results back oldest first, and plays the clients who receive the
tokens. What is checked where: a step's form and what it reads in `device`, the cache in `cache`, who runs and who waits in
`order`, counters and request fields in `books`. It drives anything that is a `Scheduler` through that interface alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from pydantic import BaseModel

from enginebay.conformance.scheduler import answers, books, order
from enginebay.conformance.scheduler.arrangement import Arrangement, Load
from enginebay.conformance.scheduler.cache import WatchedCache
from enginebay.conformance.scheduler.device import Device, Flying
from enginebay.conformance.scheduler.watch import OutOfScope, Topic, Violation, Watch
from enginebay.errors import RequestError, RequestTooLargeError
from enginebay.interfaces.scheduler import (
    FinishReason,
    KVCacheManager,
    Request,
    RequestOutputDelta,
    RequestStatus,
    Scheduler,
    SchedulerContext,
    SchedulerOutput,
    SchedulingPolicy,
)
from enginebay.kv_cache.coordinator import KVCacheCoordinator
from enginebay.plugins.records import NoOptions
from enginebay.sampling.params import SamplingParams

Result = TypeVar("Result")


@dataclass
class Received:
    """What the client got of one request."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    #: tokens that were computed already at each time that it was seated
    seated: list[int] = field(default_factory=list)


def accounting(arrangement: Arrangement) -> KVCacheCoordinator:
    """The engine's block accounting, of these sizes."""
    return KVCacheCoordinator(
        windows=arrangement.windows,
        block_size=arrangement.block_size,
        num_blocks=arrangement.usable_blocks + 1,
        max_num_seqs=arrangement.max_num_seqs,
        max_model_len=arrangement.max_model_len,
        max_tokens_in_flight=arrangement.budget * arrangement.concurrent,
        prefix_caching=arrangement.prefix_caching,
    )


def context_for(arrangement: Arrangement, kv: KVCacheManager, options: BaseModel) -> SchedulerContext:
    """What a record's factory is given by an engine of these sizes."""
    return SchedulerContext(
        kv=kv,
        max_num_seqs=arrangement.max_num_seqs,
        max_num_batched_tokens=arrangement.budget,
        max_model_len=arrangement.max_model_len,
        chunked_prefill=arrangement.chunked_prefill,
        max_prefill_tokens=arrangement.max_prefill_tokens,
        max_concurrent_batches=arrangement.concurrent,
        policy=None,
        options=options,
    )


class Simulator:
    """A scheduler at work.

    Parameters
    ----------
    build
        Makes the scheduler of its context, and names the policy that steers it, where one does: then its order is checked.
    arrangement
        Sizes.
    watch
        What is checked; by default everything.
    options
        The plugin's own options.
    name
        Number of a request -> its id.
    """

    def __init__(
        self,
        build: Callable[[SchedulerContext], tuple[Scheduler, SchedulingPolicy | None]],
        arrangement: Arrangement,
        watch: Watch | None = None,
        *,
        options: BaseModel | None = None,
        name: Callable[[int], str] = "r{}".format,
    ) -> None:
        self.arrangement, self.watch, self._name = arrangement, watch or Watch(), name
        #: steps in flight, oldest first
        self.flying: list[Flying] = []
        self.kv = accounting(arrangement)
        cache = self._cache = WatchedCache(self.kv, self.watch, lambda: [step.output for step in self.flying])
        self.context = context_for(arrangement, cache, options or NoOptions())
        self.scheduler, self.policy = self._ask(lambda: build(self.context))
        self.device = Device(arrangement, self.watch)
        self.received: dict[str, Received] = {}
        #: every step that was composed
        self.outputs: list[SchedulerOutput] = []
        #: request ids of each step, in the order of its rows
        self.history: list[list[str]] = []

    # --- requests

    def make(self, load: Load, name: str = "") -> Request:
        """A new request, not yet added."""
        arrival = len(self.received)
        return Request(
            name or self._name(arrival),
            np.array(load.prompt, dtype=np.int32),
            SamplingParams(max_tokens=max(load.outputs, 1)),
            frozenset(load.stops),
            load.outputs,
            seed=arrival,
            arrival=arrival,
            priority=load.priority,
            cache_extras=(("salt", load.salt),) if load.salt else (),
        )

    def queue(self, load: Load, name: str = "") -> Request:
        """Give the scheduler a new request; what it raises is passed on."""
        made = self.make(load, name)
        self.scheduler.add(made)
        self.received[made.request_id] = Received(made)
        books.check(self)
        return made

    def offer(self, load: Load, name: str = "") -> Request | None:
        """The same, for one that must be refused if it can never run, and only then; None if it was."""
        able = self.can_run(load)
        try:
            made = self._ask(lambda: self.queue(load, name), RequestError)
        except RequestError as error:
            right = not able and isinstance(error, RequestTooLargeError)
            self.watch.expect("refusal", right, "{} was refused by {!r}", load, error)
            books.check(self)
            return None
        self.watch.expect("refusal", able, "C21: {} was queued, but can never run in {}", load, self.arrangement)
        return made

    def can_run(self, load: Load) -> bool:
        """Whether the request could run in an empty engine."""
        whole, sizes = len(load.prompt) + load.outputs, self.arrangement
        cut = sizes.chunked_prefill or len(load.prompt) <= sizes.budget
        some = len(load.prompt) >= 1 and load.outputs >= 1
        return some and cut and whole <= sizes.max_model_len and self.kv.fits(whole - 1)

    def abort(self, *names: str) -> None:
        """Abort; every unfinished one of `names` must end by one delta, without tokens."""
        unfinished = {name for name in names if name in self.received and not self.received[name].finish_reason}
        deltas = self._ask(lambda: self.scheduler.abort(names))
        ended = [delta.request_id for delta in deltas]
        right = sorted(ended) == sorted(unfinished)
        self.watch.expect("abort", right, "abort of {} ended {}, unfinished were {}", names, ended, sorted(unfinished))
        for delta in deltas:
            right = delta.finish_reason == "abort" and not delta.new_token_ids
            self.watch.expect("abort", right, "an aborted request's delta is {}", delta)
            self._receive(delta)
        books.check(self)

    # --- steps

    def step(self) -> SchedulerOutput | None:
        """Schedule one step and let the device run it."""
        full = len(self.flying) >= self.arrangement.concurrent
        waiting = [got for got in self.received.values() if got.finish_reason is None]
        output = self._ask(self.scheduler.schedule)
        if output is None:
            return None
        most = self.arrangement.concurrent
        self.watch.expect("flight", not full, "a step was composed with {} in flight, the most allowed", most)
        order.check_running(self, output)
        order.check_budget(self, output)
        step = self.device.execute(output, {got.request.request_id: got.request for got in waiting}, self.flying)
        for new in output.new_requests:
            self._cache.retired[new.slot] = new.num_computed_tokens
            self.received[new.request_id].seated.append(new.num_computed_tokens)
        self.outputs.append(output)
        self.history.append([self.device.seats[slot].request.request_id for slot in output.slots.tolist()])
        order.check_turns(self, output)
        self.flying.append(step)
        books.check(self)
        return output

    def retire(self) -> None:
        """Give the scheduler the result of the oldest step in flight."""
        step = self.flying.pop(0)
        reached = step.output.num_computed_tokens + step.output.num_scheduled_tokens
        self._cache.retired |= dict(zip(step.output.slots.tolist(), reached.tolist(), strict=True))
        living = {name for name, got in self.received.items() if got.finish_reason is None}
        was_preempted = {name for name in living if self.received[name].request.status is RequestStatus.PREEMPTED}
        deltas = self._ask(lambda: self.scheduler.update(step.output, step.result))
        given = {delta.request_id: delta.new_token_ids for delta in deltas}
        self.watch.expect("answers", len(given) == len(deltas), "two deltas of a request from one step: {}", given)
        wanted = {name: [token] for name, token in step.sampled.items() if name in living}
        wrong = {name for name in wanted.keys() | given.keys() if wanted.get(name, []) != given.get(name, [])}
        resting = all(name in was_preempted for name in wrong)
        topic: Topic = "preemption" if resting else "answers"
        self.watch.expect(topic, not wrong, "a step sampled {}, but its deltas hold {}", wanted, given)
        for delta in deltas:
            self._receive(delta)
        books.check(self)

    def run(self, steps: int | None = None) -> None:
        """Run until all is done, keeping as many steps in flight as allowed; or for `steps` steps, if there is so much."""
        ran, progress, tokens = 0, 0, -1
        patience = 50 + 4 * sum(
            got.request.num_prompt_tokens + got.request.max_output_tokens for got in self.unfinished
        )
        while self._ask(self.scheduler.has_unfinished) and (steps is None or ran < steps):
            if self.step() is None or len(self.flying) >= self.arrangement.concurrent:
                text = "C22: {} wait, nothing is in flight, and nothing can run"
                self.watch.expect("liveness", bool(self.flying), text, [g.request.request_id for g in self.unfinished])
                self.retire()
            ran += 1
            if (given := sum(len(got.tokens) for got in self.received.values())) > tokens:
                progress, tokens = ran, given
            self.watch.expect("liveness", ran - progress < patience, "C22: {} steps without a token", ran - progress)

    def check_idle(self) -> None:
        """C24: when nothing is unfinished, everything is back and everyone got what it should."""
        lost = [got.request.request_id for got in self.unfinished]
        self.watch.expect("liveness", not lost, "nothing is unfinished, the scheduler says, but {} never ended", lost)
        free, blocks = self.kv.num_free_blocks, self.kv.num_blocks
        self.watch.expect("conservation", free == blocks, "C24: idle, but {} of {} blocks are free", free, blocks)
        for got in self.received.values():
            tokens, reason = answers.reference(got.request)
            if got.finish_reason == "abort":
                tokens, reason = tokens[: len(got.tokens)], "abort"
            right = (got.tokens, got.finish_reason) == (tokens, reason)
            text = "{} got {} and ended by {}, should be {} and {}"
            name = got.request.request_id
            self.watch.expect("answers", right, text, name, got.tokens, got.finish_reason, tokens, reason)

    @property
    def unfinished(self) -> list[Received]:
        """Requests whose client still waits."""
        return [got for got in self.received.values() if got.finish_reason is None]

    def tokens(self, name: str) -> list[int]:
        """What a client has."""
        return self.received[name].tokens

    # --- inside

    def _receive(self, delta: RequestOutputDelta) -> None:
        got = self.received.get(delta.request_id)
        self.watch.expect("answers", got is not None, "a delta of {}, which nobody asked for", delta.request_id)
        assert got is not None
        over = got.finish_reason
        topic: Topic = "abort" if over == "abort" else "answers"
        self.watch.expect(topic, over is None, "{} got {} after its end", delta.request_id, delta)
        books.check_delta(self, got, delta)
        got.tokens += delta.new_token_ids
        got.finish_reason = delta.finish_reason
        stops = delta.finish_reason != "stop" or delta.stop_token_id == got.tokens[-1]
        self.watch.expect("answers", stops, "{}: its stop_token_id is not its last token", delta.request_id)

    def _ask(self, call: Callable[[], Result], *passed: type[Exception]) -> Result:
        """What the scheduler answers; what it raises counts as a break of liveness, `passed` apart."""
        try:
            return call()
        except (Violation, OutOfScope):
            raise
        except passed:
            raise
        except Exception as error:
            if self.watch.watches("liveness"):
                raise
            raise OutOfScope("the scheduler raised") from error
