"""An engine in a process of its own: starts the driver in an interpreter, hands it runs, and reads times.

It knows the driver's lines and nothing of what an engine's job says (`enginebay.bench.engines` writes it).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from enginebay.bench import driver
from enginebay.bench.workload import Workload
from enginebay.errors import EngineBayError

#: seconds that an engine gets to stop by itself
_PATIENCE = 20.0


class BenchError(EngineBayError):
    """A benchmark could not be run, or its results not be written."""


@dataclass(frozen=True)
class EngineJob:
    """What to start, and where."""

    #: the engine's name, e.g. ``"vllm"``
    engine: str
    #: the interpreter
    python: str
    #: what the driver's starter reads
    settings: Mapping[str, Any]
    #: variables over the process's own
    env: Mapping[str, str]


@dataclass(frozen=True)
class RunResult:
    """One run's times."""

    #: for each request: when each of its tokens came, in seconds since the first request was handed over
    times: list[list[float]]
    #: largest resident size of the engine's processes so far; None where it cannot be read
    peak_memory_bytes: int | None

    @property
    def seconds(self) -> float:
        """Until the last token."""
        return max(row[-1] for row in self.times)


@dataclass(frozen=True)
class Ready:
    """What an engine says once it has started."""

    #: part of the start -> seconds: ``process`` (the interpreter), ``import``, ``resolve`` (ours), ``load``
    parts: dict[str, float]
    #: distribution -> version, ``python`` included
    versions: dict[str, str]
    gpus: list[str]
    #: what else the engine says of itself
    facts: dict[str, Any]


class EngineProcess:
    """A started engine. Use it in a ``with`` block: leaving it stops the process and all below it.

    Parameters
    ----------
    job
        What to start.
    on_part
        Called with the name of each part of the start as it ends.

    Raises
    ------
    BenchError
        The engine failed; the message holds what it said last.
    """

    def __init__(self, job: EngineJob, on_part: Callable[[str], None] = lambda _: None) -> None:
        self.job = job
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        try:
            self._process = subprocess.Popen(
                [job.python, str(Path(driver.__file__).resolve())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={**os.environ, **job.env},
                text=True,
                encoding="utf-8",
                start_new_session=True,  # so that a stop reaches the processes that an engine starts
            )
        except OSError as error:
            self._log.close()
            raise BenchError(f"{job.python} cannot be started: {error}") from error
        try:
            self._send({**job.settings, "engine": job.engine, "spawned": time.time()})
            for event in self._events("ready"):
                if event["event"] == "part":
                    on_part(event["name"])
        except BaseException:
            self._stop()
            raise
        self.ready = Ready(**{key: event[key] for key in ("parts", "versions", "gpus", "facts")})

    def run(self, work: Workload, on_tokens: Callable[[int], None] = lambda _: None) -> RunResult:
        """Run a workload from an empty prefix cache; `on_tokens` hears now and then how many tokens there are."""
        self._send(work.line())
        for event in self._events("run"):
            if event["event"] == "tokens":
                on_tokens(event["done"])
        return RunResult(event["times"], event["peak_memory_bytes"])

    def close(self) -> None:
        """Stop the engine, by force where it does not stop by itself."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE)
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._stop()

    def _send(self, line: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def _events(self, last: str) -> Iterator[dict[str, Any]]:
        """Events up to and including the one called `last`."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == "failed":
                raise BenchError(f"{self.job.engine}: {event['message']}")
            yield event
            if event["event"] == last:
                return
        raise self._failure()

    def _failure(self) -> BenchError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE)  # it has closed its output, so it is about to end with a status of its own
        self._kill()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        # an engine of several processes buries the cause under what followed from it
        first = next((i for i, line in enumerate(lines[:-15]) if re.search(r"\w(Error|Exception): ", line)), None)
        said = ([] if first is None else [lines[first], "..."]) + lines[-15:]
        return BenchError(
            f"{self.job.engine} in {self.job.python} ended with status {self._process.returncode}; it said last:\n  "
            + ("\n  ".join(said) or "nothing")
        )

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _stop(self) -> None:
        self._kill()
        self._log.close()
