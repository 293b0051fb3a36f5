"""The worker that an executor is tried with: it computes nothing, notes every call in a file, and fails as its script says.

It can be imported and pickled, so that an executor may make it in any process of this machine. It knows no device and no
executor, and imports no torch.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from enginebay.conformance.executor.steps import answer, digest
from enginebay.interfaces.executor import CacheGroup, KVCacheSpec
from enginebay.interfaces.scheduler import ModelOutput, SchedulerOutput
from enginebay.plugins.records import HND
from enginebay.plugins.requirements import AttentionSpec

#: how long a step waits for its gate, so that nothing waits for ever, in seconds
_GATE_S = 8.0

#: ``value``: a built-in one; ``own``: of a class of this module; ``unsendable``: cannot be pickled; ``unreadable``: can be
#: pickled but not unpickled
ErrorKind = Literal["value", "own", "unsendable", "unreadable"]


class WorkerFault(Exception):
    """An exception of the worker's own module."""


class TwoArguments(Exception):
    """An exception that unpickling cannot make again: it is given one argument and wants two."""

    def __init__(self, why: str, where: str) -> None:
        super().__init__(f"{why} {where}")


class Unsendable(Exception):
    """An exception that holds what cannot be pickled."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


@dataclass(frozen=True)
class Fault:
    """A call that fails."""

    #: ``"make"``, or a method of `FakeWorker`
    call: str
    rank: int = 0
    #: the step, of a call that belongs to one
    step: int | None = None
    error: ErrorKind = "value"

    @property
    def message(self) -> str:
        """What the exception says."""
        return f"{self.call} of rank {self.rank} fails on purpose"


@dataclass(frozen=True)
class Script:
    """What the workers of a trial do."""

    #: where they write `notes`
    folder: str
    faults: tuple[Fault, ...] = ()
    #: steps that wait until `Script.open_gate` was called
    gated: tuple[int, ...] = ()
    #: ids reach the host only after ``sample`` has returned, as they do from a GPU
    late: bool = False
    #: bytes left for the cache, by rank
    memory: tuple[int, ...] = (2**40 + 12345,) * 8
    #: cache tensors of the same layers differ between ranks
    disagreeing: bool = False

    def open_gate(self) -> None:
        """Let gated steps go on."""
        (Path(self.folder) / "open").touch()

    def wait_at_gate(self) -> None:
        """Wait for it."""
        end = time.monotonic() + _GATE_S
        while not (Path(self.folder) / "open").exists():
            if time.monotonic() > end:
                raise TimeoutError("nobody opened the gate")
            time.sleep(0.002)

    def notes_file(self, rank: int) -> Path:
        """Where a rank notes its calls."""
        return Path(self.folder) / f"rank-{rank}.jsonl"


@dataclass(frozen=True)
class Note:
    """One call of a worker."""

    call: str
    #: process and its thread
    pid: int
    thread: int
    #: the step, of a call that belongs to one
    step: int | None
    #: what it was given: a number, or the digest of an object
    given: Any = None


def notes(script: Script, rank: int) -> list[Note]:
    """The calls that a rank has had so far."""
    file = script.notes_file(rank)
    if not file.exists():
        return []
    return [Note(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def cache_spec(variant: int = 0) -> KVCacheSpec:
    """A cache of two groups, one with a window; `variant` changes its block size."""
    full = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=64, scale=0.125, soft_cap=30.0)
    window = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=64, scale=0.125, window=512, sinks=True)
    groups = (CacheGroup(spec=full, layers=(0, 2)), CacheGroup(spec=window, layers=(1, 3)))
    return KVCacheSpec(groups=groups, block_size=16 + variant, kv_dtype="bfloat16", layout=HND)


class FakeWorker:
    """A rank without a model. Implements `enginebay.interfaces.executor.Worker`."""

    #: not a method: ``collective_rpc`` refuses it
    attribute = 3

    def __init__(self, script: Script, rank: int) -> None:
        self.script = script
        self.rank = rank
        self._executed: SchedulerOutput | None = None
        self._enter("make")

    def start(self) -> None:
        """Do nothing."""
        self._enter("start")

    def kv_cache_spec(self) -> KVCacheSpec:
        """The same of every rank, or not, as the script says."""
        self._enter("kv_cache_spec")
        return cache_spec(self.rank if self.script.disagreeing else 0)

    def available_kv_memory(self) -> int:
        """As the script says, in bytes."""
        self._enter("available_kv_memory")
        return self.script.memory[self.rank]

    def kv_budget(self) -> None:
        """Nothing was measured."""
        self._enter("kv_budget")

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Note the number."""
        self._enter("initialize_kv_cache", given=num_blocks)

    def execute_model(self, output: SchedulerOutput) -> None:
        """Take a little time, other steps another."""
        self._executed = None
        if output.step in self.script.gated:
            self.script.wait_at_gate()
        self._enter("execute_model", output.step, digest(output))
        time.sleep(0.003 * ((output.step * 5 + self.rank) % 3))
        self._executed = output

    def sample(self) -> Future[ModelOutput]:
        """The answer to the step that ran last."""
        output, self._executed = self._executed, None
        self._enter("sample", None if output is None else output.step)
        if output is None:
            raise RuntimeError("sample was called, and no step has been executed since")
        future: Future[ModelOutput] = Future()
        if self.script.late:
            threading.Timer(0.01, future.set_result, [answer(output)]).start()
        else:
            future.set_result(answer(output))
        return future

    def shutdown(self) -> None:
        """Do nothing."""
        self._enter("shutdown")

    # --- called by name

    def whereabouts(self) -> tuple[int, int, str]:
        """Rank, process, and where that number means this process."""
        return self.rank, os.getpid(), place()

    def echo(self, *args: Any) -> tuple[int, tuple[Any, ...]]:
        """Rank, and what it was given."""
        self._enter("echo")
        return self.rank, args

    def nap(self, seconds: float) -> int:
        """Take that long."""
        self._enter("nap")
        time.sleep(seconds)
        return self.rank

    def fail(self, kind: ErrorKind, rank: int) -> None:
        """Raise on one rank."""
        if rank == self.rank:
            _fails_inside_the_worker(Fault("fail", rank, error=kind))

    def installed_plugins(self) -> list[tuple[str, str, str, str]]:
        """Kind, name, distribution and version of every plugin that this process finds."""
        return installed_plugins()

    def _enter(self, call: str, step: int | None = None, given: Any = None) -> None:
        """Note a call, and fail if the script says so."""
        note = {"call": call, "pid": os.getpid(), "thread": threading.get_ident(), "step": step, "given": given}
        with self.script.notes_file(self.rank).open("a", encoding="utf-8") as file:
            file.write(json.dumps(note) + "\n")
        for fault in self.script.faults:
            if (fault.call, fault.rank, fault.step) == (call, self.rank, step):
                _fails_inside_the_worker(fault)


def place() -> str:
    """Where process numbers are this process's: the machine, and the namespace where the system has such."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def installed_plugins() -> list[tuple[str, str, str, str]]:
    """Kind, name, distribution and version of every plugin that this process finds."""
    from enginebay.plugins.catalogue import Catalogue

    catalogue = Catalogue.discover(known=())
    found = [entry for entry in catalogue.entries if catalogue.disabled_by(entry) is None]
    return [(e.kind, e.name, e.distribution, catalogue.copy_of(e.distribution).version) for e in found]


def _fails_inside_the_worker(fault: Fault) -> NoReturn:
    """The function whose name shows in a traceback that came from the worker."""
    match fault.error:
        case "value":
            raise ValueError(fault.message)
        case "own":
            raise WorkerFault(fault.message)
        case "unsendable":
            raise Unsendable(fault.message)
        case "unreadable":
            raise TwoArguments(fault.message, "twice")
