"""Cases run in several processes that share the GPU, so that what libraries compile at run time is compiled side by side.

A process runs one job, a list of cases, and tells of each before and after. One that dies, as a kernel's fault kills
everything that uses its device context, costs the case that it was in; the rest of its job starts anew.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from enginebay.conformance.attention.cases import Case
from measuring import Budget


@dataclass(frozen=True)
class Result:
    """What became of a case."""

    case: Case
    #: figures of a case that ran to its end
    values: dict[str, Any] = field(default_factory=dict)
    #: the traceback, or how the process ended; None where the case ran
    error: str | None = None
    #: whether time was up before it ended
    unfinished: bool = False


Runner = Callable[[Case, str], dict[str, Any]]


def run_jobs(jobs: Sequence[list[Case]], run: Runner, device: str, processes: int, budget: Budget) -> Iterator[Result]:
    """Results in order of completion.

    Parameters
    ----------
    jobs
        Lists of cases; the first are started first.
    run
        What is done with a case on a device; a function of a module, so that another process can import it.
    device
        ``"cuda"`` or ``"cpu"``.
    processes
        How many run at a time.
    budget
        When it is spent, running processes are ended and what is left is reported as unfinished.
    """
    waiting = [list(job) for job in jobs]
    running: dict[Connection, _Job] = {}
    try:
        while (waiting or running) and not budget.spent:
            while waiting and len(running) < processes:
                job = _Job(waiting.pop(0), run, device)
                running[job.pipe] = job
            for pipe in wait(list(running), timeout=max(0.0, min(1.0, budget.left))):
                assert isinstance(pipe, Connection)
                job = running[pipe]
                try:
                    yield job.receive()
                except EOFError:
                    del running[pipe]
                    job.process.join()
                    if job.cases and job.process.exitcode:
                        yield Result(job.cases.pop(0), error=f"the process ended with status {job.process.exitcode}")
                    if job.cases:
                        waiting.insert(0, job.cases)
        for case in [case for cases in (*(job.cases for job in running.values()), *waiting) for case in cases]:
            yield Result(case, unfinished=True)
    finally:
        for job in running.values():
            job.end()


class _Job:
    def __init__(self, cases: list[Case], run: Runner, device: str) -> None:
        #: those without a result yet; the first is being run
        self.cases = cases
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_work, args=(theirs, list(cases), run, device), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self) -> Result:
        result = self.pipe.recv()
        assert isinstance(result, Result)
        self.cases.pop(0)
        return result

    def end(self) -> None:
        """Kill it, and the compilers that it started, which would disturb what is measured next."""
        assert self.process.pid is not None
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has not come as far as to lead a group, or has ended
            self.process.kill()
        self.process.join()


def _work(pipe: Connection, cases: list[Case], run: Runner, device: str) -> None:
    os.setpgrp()
    for case in cases:
        try:
            pipe.send(Result(case, run(case, device)))
        except Exception as error:
            pipe.send(Result(case, error=traceback.format_exc()))
            if "CUDA error" in str(error):  # the device context is of no more use, not even to be closed
                os._exit(0)
