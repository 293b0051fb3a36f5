"""The driver: advances an engine for everybody who waits on it, and hands each request's output to its stream.

It knows the engine's client and the output processor; it knows no prompt, tokenizer or configuration.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Self

from enginebay.engine.client import EngineClient, interrupts_held
from enginebay.engine.output_processor import OutputProcessor
from enginebay.engine.outputs import RequestOutput
from enginebay.engine.request_state import RequestState
from enginebay.errors import EngineDeadError
from enginebay.interfaces.scheduler import Request, SchedulerStats


class _Turns:
    """A re-entrant lock that threads get in turn.

    A thread that comes back at once finds `_next` taken by the one that waits, so no loop over steps starves the others.
    """

    def __init__(self) -> None:
        self._next, self._held = threading.RLock(), threading.RLock()

    def __enter__(self) -> None:
        with self._next:
            self._held.acquire()

    def __exit__(self, *_: object) -> None:
        self._held.release()


class Driver:
    """One engine and its unfinished requests. Threads take turns, a step each."""

    def __init__(self, client: EngineClient, outputs: OutputProcessor) -> None:
        self._client = client
        self._outputs = outputs
        #: requests whose streams the garbage collector dropped, to be aborted between steps
        self._dropped: deque[str] = deque()
        self._turns = _Turns()
        self._running = True

    def check_running(self) -> None:
        """Raise `EngineDeadError` if the engine was shut down."""
        if not self._running:
            raise EngineDeadError("the engine was shut down: make a new one")

    def add(self, requests: Sequence[Request], prompt: str | None, arrival_time: float) -> RequestState:
        """Queue a checked request, as one of the engine's a completion; the first has its id.

        Raises `RequestError` if the engine refuses it; then nothing of it stays.
        """
        with self._turns:
            self.check_running()
            state = self._outputs.add(requests, prompt, arrival_time)
            try:
                for request in requests:
                    self._client.add_request(request)
            except BaseException:
                self.abort([state.request_id])
                raise
            return state

    def advance(self) -> None:
        """Run the engine a step on, for every waiting request."""
        with interrupts_held(), self._turns:
            self.check_running()
            while self._dropped:
                self.abort([self._dropped.popleft()])
            deltas = self._client.step()
            if stopped := self._outputs.process(deltas):
                self._client.abort(stopped, "stop")
            if not deltas and not self._client.has_unfinished() and (lost := self._outputs.unfinished):
                self._outputs.abort(lost)
                raise EngineDeadError(f"the engine ended without finishing request(s) {', '.join(lost)}")

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests with what they have; unknown and finished ids are ignored."""
        with self._turns:
            if ids := self._outputs.abort(request_ids):
                with contextlib.suppress(EngineDeadError):  # a dead engine has nothing to abort
                    self._client.abort(ids)

    def stats(self) -> SchedulerStats:
        """The engine's counters, between two steps."""
        with self._turns:
            self.check_running()
            return self._client.stats()

    def reset_prefix_cache(self) -> None:
        """Make what is cached unfindable, between two steps."""
        with self._turns:
            self.check_running()
            self._client.reset_prefix_cache()

    def drop(self, request_id: str) -> None:
        """Abort a request before the next step. Unlike `abort` it may be called in the middle of one."""
        self._dropped.append(request_id)

    def shutdown(self) -> None:
        """Stop the engine; what waits ends with `EngineDeadError`. A second call does nothing."""
        with self._turns:
            if self._running:
                self._running = False
                self._outputs.abort(self._outputs.unfinished)
                self._client.shutdown()

    def read(self, state: RequestState) -> RequestOutput:
        """What a request has so far, between two steps."""
        with self._turns:
            return state.read()


class RequestStream(Iterator[RequestOutput]):
    """The growing output of one request; see `enginebay.LLM.stream`."""

    def __init__(self, driver: Driver, state: RequestState) -> None:
        self._driver = driver
        self._state = state
        self._closed = False

    @property
    def request_id(self) -> str:
        """The id, as `enginebay.LLM.abort` takes it."""
        return self._state.request_id

    def __next__(self) -> RequestOutput:
        if self._closed or (self._state.finished and not self._state.unread):
            raise StopIteration
        while not self._state.unread:
            self._driver.advance()
        self._driver.check_running()
        return self._driver.read(self._state)

    def close(self) -> None:
        """Abort the request unless it has finished, and end the iteration."""
        if not self._closed:
            self._closed = True
            self._driver.abort([self.request_id])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # The collector may run inside a step, so the request is not aborted here.
        if not self._closed and not self._state.finished:
            self._driver.drop(self.request_id)
