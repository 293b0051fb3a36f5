"""A bound on how long a call may take, so that an executor that hangs fails a law and not the run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

#: more than any call on fake workers takes, new processes on a busy machine included, in seconds
BOUND_S = 20.0


class _TooLate(BaseException):
    """Passes through ``except Exception``."""


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Fail if the block takes longer. In the main thread of a system with interval timers; elsewhere there is no bound."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise _TooLate

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _TooLate:
        pytest.fail(f"{what} did not return within {seconds:g} s")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
