"""The engine's client: how `LLM` (and, later, a server) reaches an engine, in this process or in another.

It knows the engine's methods and nothing of text. No client is thread-safe.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from enginebay.interfaces.scheduler import FinishReason, Request, RequestOutputDelta, SchedulerStats

if TYPE_CHECKING:
    from enginebay.engine.core import EngineCore, EngineInfo


class EngineClient(Protocol):
    """An engine as its front sees it."""

    @property
    def info(self) -> EngineInfo:
        """The resolved configuration, the selections, and the limits that requests must keep."""

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises `RequestError` for that request alone."""

    def abort(self, request_ids: Iterable[str], reason: FinishReason = "abort") -> None:
        """End requests in whatever state they are; unknown or finished ids are ignored.

        `reason` is what observers hear: a stop string, which the engine does not see, is a ``"stop"``.
        """

    def step(self) -> list[RequestOutputDelta]:
        """Advance the engine and return what its requests gained, which may be nothing."""

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""

    def stats(self) -> SchedulerStats:
        """Counters as of now."""

    def reset_prefix_cache(self) -> None:
        """Make what is cached unfindable (C29). Running requests keep their own."""

    def shutdown(self) -> None:
        """Stop the engine and free its device. Further calls do nothing."""


class InprocClient:
    """An engine in this process: every call goes straight to the core."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    @property
    def info(self) -> EngineInfo:
        """The core's."""
        return self._core.info

    def add_request(self, request: Request) -> None:
        """Queue a request."""
        self._core.add_request(request)

    def abort(self, request_ids: Iterable[str], reason: FinishReason = "abort") -> None:
        """End requests."""
        self._core.abort(request_ids, reason)

    def step(self) -> list[RequestOutputDelta]:
        """Run a step."""
        return self._core.step()

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return self._core.has_unfinished()

    def stats(self) -> SchedulerStats:
        """The scheduler's counters."""
        return self._core.stats()

    def reset_prefix_cache(self) -> None:
        """Make what is cached unfindable."""
        self._core.reset_prefix_cache()

    def shutdown(self) -> None:
        """Stop the core."""
        self._core.shutdown()


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Put Ctrl-C off until the block has ended, so that a step is done whole and the engine can serve on.

    A second Ctrl-C interrupts at once. Outside the main thread, where Python delivers no signals, this does nothing.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    held = False

    def hold(signum: int, frame: FrameType | None) -> None:
        nonlocal held
        if held:
            held = False
            previous(signum, frame)
        held = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if held:
        signal.raise_signal(signal.SIGINT)
