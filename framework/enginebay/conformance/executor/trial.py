"""One executor over fake workers, and what can be asked of it. Whatever a law finds, the executor is shut down after it."""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import pytest

from enginebay.conformance.executor.bound import BOUND_S, within
from enginebay.conformance.executor.fake_worker import FakeWorker, Fault, Note, Script, notes
from enginebay.conformance.executor.left_behind import Process
from enginebay.conformance.executor.steps import step
from enginebay.conformance.suite import Settings
from enginebay.interfaces.executor import Executor, ExecutorContext
from enginebay.interfaces.scheduler import ModelOutput
from enginebay.plugins.records import ExecutorRecord

T = TypeVar("T")


@dataclass(frozen=True)
class Arrangement:
    """How an executor is set up."""

    #: ``world_size``
    ranks: int
    #: ``max_concurrent_batches``
    depth: int

    def __str__(self) -> str:
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}, {self.depth} in flight"


@dataclass
class Trial:
    """An executor, and the script of its workers."""

    executor: Executor
    script: Script
    arrangement: Arrangement

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.arrangement.ranks)

    @property
    def depth(self) -> int:
        """Steps that may be in flight, by the executor's own word."""
        return self.executor.max_concurrent_batches

    def start(self) -> Trial:
        """Start it."""
        self.call("start", self.executor.start)
        return self

    def call(self, what: str, function: Callable[..., T], *args: Any, **named: Any) -> T:
        """Call the executor, within bounds."""
        with within(BOUND_S, what):
            return function(*args, **named)

    def rpc(self, method: str, *args: Any, **named: Any) -> list[Any]:
        """Call a method of the workers."""
        return self.call(f"collective_rpc({method!r})", self.executor.collective_rpc, method, *args, **named)

    def launch(self, number: int) -> tuple[Future[None], Future[ModelOutput]]:
        """Execute and sample step `number`."""
        with within(BOUND_S, f"launching step {number}"):
            return self.executor.execute_model(step(number)), self.executor.sample()

    def result(self, future: Future[T]) -> T:
        """What a future holds."""
        with within(BOUND_S, "a future"):
            return future.result(BOUND_S)

    def run(self, number: int) -> ModelOutput:
        """Step `number`, to its end."""
        executed, sampled = self.launch(number)
        self.result(executed)
        return self.result(sampled)

    def failure(self, what: str, function: Callable[..., Any], *args: Any, **named: Any) -> BaseException:
        """What a call raises, itself or through the future that it returns."""
        try:
            with within(BOUND_S, what):
                given = function(*args, **named)
                if isinstance(given, Future):
                    given.result(BOUND_S)
        except (Exception, CancelledError) as error:
            return error
        pytest.fail(f"{what} raised nothing")

    def notes(self, rank: int = 0) -> list[Note]:
        """The calls that a rank has had."""
        return notes(self.script, rank)

    def calls(self, rank: int = 0) -> list[str]:
        """Their names."""
        return [note.call for note in self.notes(rank)]

    def processes(self) -> list[Process]:
        """The workers' processes that are not this one, as far as they are on this machine."""
        pids = {note.pid for rank in self.ranks for note in self.notes(rank)} - {os.getpid()}
        return [found for pid in sorted(pids) if (found := Process.of(pid)) is not None]

    def shutdown(self) -> None:
        """Shut it down."""
        self.call("shutdown", self.executor.shutdown)


@contextmanager
def trial(
    record: ExecutorRecord, settings: Settings, arrangement: Arrangement, *, start: bool = True, **script: Any
) -> Iterator[Trial]:
    """An executor by its record's factory, whose workers follow a `Script` of these fields."""
    with tempfile.TemporaryDirectory(prefix="enginebay-executor-") as folder:
        made = make(record, settings, arrangement, Script(folder, **script))
        try:
            yield made.start() if start else made
        finally:
            made.script.open_gate()
            processes = made.processes()
            try:
                made.shutdown()
            finally:
                _end(processes)


def make(record: ExecutorRecord, settings: Settings, arrangement: Arrangement, script: Script) -> Trial:
    """The same, for who shuts it down."""
    context = ExecutorContext(
        make_worker=partial(FakeWorker, script),
        world_size=arrangement.ranks,
        device=settings.device,
        max_concurrent_batches=arrangement.depth,
        options=record.options(),
    )
    executor = record.factory(context)
    assert isinstance(executor, Executor), f"the factory returned {executor!r}, no Executor"
    return Trial(executor, script, arrangement)


def text_of(error: BaseException) -> str:
    """All that an error says: its message, its notes, its causes, and where they were raised."""
    return "".join(traceback.format_exception(error))


def check_is(error: BaseException, fault: Fault, kind: type[BaseException] = ValueError) -> None:
    """Fail unless `error` is what a worker raised for `fault`, with its rank and its traceback."""
    assert type(error) is kind, f"a worker's {kind.__name__} came as {error!r}"
    assert str(error) == fault.message, f"the message {fault.message!r} came as {str(error)!r}"
    text = text_of(error)
    assert f"rank {fault.rank}" in text.replace(fault.message, ""), (
        f"nothing says that rank {fault.rank} failed:\n{text}"
    )
    assert "_fails_inside_the_worker" in text, f"the worker's traceback is lost:\n{text}"


def _end(processes: list[Process]) -> None:
    """End workers that outlived their executor, lest they stay after the run."""
    for process in processes:
        if process.exists:
            os.kill(process.pid, signal.SIGKILL)
