"""The engine core: keeps steps in flight between a scheduler and an executor.

It knows requests as ids and counts; text is its client's, tensors are the worker's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from enginebay.config import EngineConfig, ResolvedConfig
from enginebay.errors import EngineDeadError
from enginebay.interfaces.executor import Executor
from enginebay.interfaces.scheduler import (
    FinishReason,
    KVCacheManager,
    ModelOutput,
    Request,
    RequestOutputDelta,
    Scheduler,
    SchedulerOutput,
    SchedulerStats,
)
from enginebay.plugins.observers import Observers
from enginebay.plugins.selection import Selection


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What an engine is: read-only, for clients, reports and observers."""

    config: EngineConfig
    #: dotted path of each value -> where it was written
    sources: Mapping[str, object]
    resolved: ResolvedConfig
    selections: tuple[Selection, ...]
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request: what admission, the model listing and the workers all use (C7)."""
        return self.resolved.max_model_len


@dataclass(frozen=True, slots=True)
class StepInfo:
    """A retired step, for observers."""

    index: int
    num_rows: int
    num_tokens: int
    #: from its launch to its retirement, in seconds
    duration: float


@dataclass(slots=True)
class _InFlight:
    output: SchedulerOutput
    executed: Future[None]
    sampled: Future[ModelOutput]
    launched: float


class EngineCore:
    """Schedules, launches and retires steps. Not thread-safe.

    Parameters
    ----------
    info
        The engine's description.
    executor
        Started, its KV cache initialised.
    scheduler
        Empty.
    kv
        The block accounting that the scheduler uses.
    max_concurrent_batches
        Steps in flight; 1 is synchronous.
    observers
        Those that listen.
    """

    def __init__(
        self,
        info: EngineInfo,
        executor: Executor,
        scheduler: Scheduler,
        kv: KVCacheManager,
        max_concurrent_batches: int,
        observers: Observers,
    ) -> None:
        self.info = info
        self.executor = executor
        self.scheduler = scheduler
        self._kv = kv
        self._depth = max_concurrent_batches
        self._observers = observers
        self._in_flight: deque[_InFlight] = deque()
        self._arrivals = 0
        self._dead: BaseException | None = None
        self._stopped = False
        #: only a step's results are awaited: an interrupt here leaves scheduler and worker as they were
        self._waiting = False
        if observers.wants_engine_started:
            observers.engine_started(info)

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises `RequestError` for that request alone."""
        self._check_alive()
        request.arrival = self._arrivals
        self.scheduler.add(request)
        self._arrivals += 1

    def abort(self, request_ids: Iterable[str], reason: FinishReason = "abort") -> None:
        """End requests in whatever state they are; unknown or finished ids are ignored. Observers hear `reason`."""
        if not self._stopped:
            deltas = self.scheduler.abort(request_ids)
            for delta in deltas:
                delta.finish_reason = reason
            self._tell_finished(deltas)

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs, or a step is in flight."""
        return not self._stopped and self.scheduler.has_unfinished()

    def stats(self) -> SchedulerStats:
        """The scheduler's counters."""
        return self.scheduler.stats()

    def reset_prefix_cache(self) -> None:
        """Make what is cached unfindable, what running requests hold included (C29)."""
        self._check_alive()
        self._kv.reset_prefix_cache()

    def step(self) -> list[RequestOutputDelta]:
        """Fill the pipeline, then retire the oldest step.

        Raises
        ------
        EngineDeadError
            A worker failed, or nothing can run though requests wait.

        An interrupt while a step's results are awaited loses nothing. One that cuts a launch or an update short ends the
        engine: scheduler and worker no longer agree on what has run.
        """
        self._check_alive()
        try:
            self._launch()
            if not self._in_flight:
                self._watch()
                return []
            return self._retire()
        except Exception as error:
            self._dead = error
            dead = EngineDeadError(f"the engine stopped: {type(error).__name__}: {error}")
            try:
                self.shutdown()
            except Exception as second:  # a broken device fails here too; the first fault is the one to report
                dead.add_note(f"its shutdown failed too: {type(second).__name__}: {second}")
            raise dead from error
        except BaseException as interrupt:
            if not self._waiting:
                self._dead = EngineDeadError(f"{type(interrupt).__name__} cut a step short; make a new engine")
                self.shutdown()
            raise
        finally:
            self._waiting = False

    def _launch(self) -> None:
        while len(self._in_flight) < self._depth:
            output = self.scheduler.schedule()
            if output is None:
                return
            executed = self.executor.execute_model(output)
            if executed.done():
                executed.result()  # a launch that failed at once is the fault to report, not the sampling after it
            self._in_flight.append(_InFlight(output, executed, self.executor.sample(), time.monotonic()))

    def _retire(self) -> list[RequestOutputDelta]:
        step = self._in_flight[0]
        self._waiting = True
        step.executed.result()
        result = step.sampled.result()
        self._waiting = False
        self._in_flight.popleft()  # only now: an interrupt while waiting must not lose the step
        deltas = self.scheduler.update(step.output, result)
        if self._observers.wants_step_finished:
            self._observers.step_finished(
                StepInfo(
                    step.output.step, step.output.num_rows, step.output.num_tokens, time.monotonic() - step.launched
                )
            )
        self._tell_finished(deltas)
        return deltas

    def _tell_finished(self, deltas: list[RequestOutputDelta]) -> None:
        if self._observers.wants_request_finished:
            for delta in deltas:
                if delta.finish_reason is not None:
                    self._observers.request_finished(delta)

    def _watch(self) -> None:
        """Nothing runs and nothing is in flight: then nothing may wait (C22)."""
        stats = self.scheduler.stats()
        if stats.num_waiting or stats.num_running:
            raise EngineDeadError(
                f"waiting {stats.num_waiting}, running {stats.num_running}, and the scheduler composes no step "
                f"({stats.num_free_blocks} of {stats.num_blocks} blocks free); the scheduling policy holds them back"
            )

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(f"the engine stopped: {self._dead}") from self._dead
        if self._stopped:
            raise EngineDeadError("the engine was shut down; make a new one")

    def shutdown(self) -> None:
        """Stop the executor and free its device. Further calls do nothing."""
        if self._stopped:
            return
        self._stopped = True
        self._in_flight.clear()
        try:
            self.executor.shutdown()
        finally:
            if self._observers.wants_engine_stopped:
                self._observers.engine_stopped(self.info)
