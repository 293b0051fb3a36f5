"""An executor whose workers live in processes of their own: the right one, of which the executor mutants are made.

A worker answers calls in their order. One thread of the parent collects answers, hears of deaths and completes futures.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from enginebay.errors import ExecutorError
from enginebay.interfaces.executor import Executor, ExecutorContext, KVCacheSpec, Worker
from enginebay.interfaces.scheduler import ModelOutput, SchedulerOutput

#: how long a worker may take to end by itself, in seconds
END_S = 5.0

Maker = Callable[[int], Worker]


def context() -> Any:
    """Processes that fork from a clean one, which has imported what the workers need."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["__main__", "enginebay.conformance.executor.fake_worker", __name__])
    return made


class Call:
    """A call to all workers: what they answered so far, and the future that waits for them."""

    def __init__(self, ranks: int) -> None:
        self.answers: list[tuple[bool, Any] | None] = [None] * ranks
        self.future: Future[list[Any]] = Future()


class ProcessExecutor(Executor):
    """One process a rank."""

    def __init__(self, context: ExecutorContext) -> None:
        super().__init__(context)
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._pending: list[deque[Call]] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._bell, self._rung = cast(tuple[Connection, Connection], (None, None))
        self._callbacks: list[Callable[[BaseException], None]] = []
        self._dead: ExecutorError | None = None
        self._ending = False

    # --- life

    def start(self) -> None:
        made = context()
        self._rung, self._bell = made.Pipe(duplex=False)
        for rank in self.ranks():
            ours, theirs = made.Pipe()
            arguments = (theirs, self.context.make_worker, rank, self.search_path())
            process = made.Process(target=type(self).serve_process, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
            self._pending.append(deque())
        self._thread = threading.Thread(target=self._collect, name="collect", daemon=True)
        self._thread.start()
        self.collective_rpc("start")

    def ranks(self) -> Sequence[int]:
        return range(self.context.world_size)

    def search_path(self) -> Sequence[str]:
        return list(sys.path)

    def shutdown(self) -> None:
        self._ending = True
        if self._thread is None:
            return
        self._send(self._pipes, None, ())
        self.end_processes()
        self._bell.send(None)
        self._thread.join()
        self._thread = None
        for pipe in (*self._pipes, self._bell, self._rung):
            pipe.close()
        self._die(ExecutorError("the executor was shut down"), tell=False)
        self._processes.clear()

    def end_processes(self) -> None:
        for process in self._processes:
            process.join(END_S)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()

    # --- calls

    def kv_cache_spec(self) -> KVCacheSpec:
        specs = self.collective_rpc("kv_cache_spec")
        if any(spec != specs[0] for spec in specs):
            raise ExecutorError(f"the ranks' cache specs differ: {specs}")
        return cast(KVCacheSpec, specs[0])

    def available_kv_memory(self) -> int:
        return int(min(self.collective_rpc("available_kv_memory")))

    def initialize_kv_cache(self, num_blocks: int) -> None:
        self.collective_rpc("initialize_kv_cache", num_blocks)

    def execute_model(self, output: SchedulerOutput) -> Future[None]:
        return mapped(self._call("execute_model", output), lambda answers: None)

    def sample(self) -> Future[ModelOutput]:
        return mapped(self._call("sample"), lambda answers: answers[0])

    def collective_rpc(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        future = self._call(method, *args)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():
                raise
            raise ExecutorError(f"{method} has not answered within {timeout_s} s") from None

    def check_health(self) -> None:
        self._require()

    def on_failure(self, callback: Callable[[BaseException], None]) -> None:
        self._callbacks.append(callback)

    # --- the wire

    def _require(self) -> None:
        if self._dead is not None:
            raise self._dead
        if self._thread is None:
            raise ExecutorError("the workers are not running")

    def _call(self, method: str, *args: Any) -> Future[list[Any]]:
        with self._lock:
            self._require()
            call = Call(len(self._pipes))
            for pending in self._pending:
                pending.append(call)
            self._send(self._pipes, method, args)
        return call.future

    def _send(self, pipes: Sequence[Connection], method: str | None, args: tuple[Any, ...]) -> None:
        for pipe in pipes:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its death is told by its sentinel
                pipe.send((method, args))

    def _collect(self) -> None:
        """Until the bell rings: take answers, and hear of deaths."""
        open_pipes = dict(zip(self._pipes, self.ranks(), strict=True))
        sentinels = {process.sentinel: rank for process, rank in zip(self._processes, self.ranks(), strict=True)}
        while True:
            ready = wait([*open_pipes, *sentinels, self._rung])
            for pipe in [pipe for pipe in open_pipes if pipe in ready]:
                try:
                    self.take(open_pipes[pipe], pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    del open_pipes[pipe]
            for sentinel in [sentinel for sentinel in sentinels if sentinel in ready]:
                rank = sentinels.pop(sentinel)
                if not self._ending:
                    self.died(rank)
            if self._rung in ready:
                return

    def take(self, rank: int, message: bytes) -> None:
        """Note an answer; the last one completes the call."""
        call = self._pending[rank].popleft()
        call.answers[rank] = cast(tuple[bool, Any], pickle.loads(message))
        if all(answer is not None for answer in call.answers) and not call.future.done():
            self.complete(call)

    def complete(self, call: Call) -> None:
        """End a call whose answers are all there."""
        answers = cast(list[tuple[bool, Any]], call.answers)
        failed = [answer for fine, answer in answers if not fine]
        if failed:
            call.future.set_exception(failed[0])
        else:
            call.future.set_result([answer for _, answer in answers])

    def died(self, rank: int) -> None:
        self._die(ExecutorError(f"rank {rank}: the worker's process is gone"), tell=True)

    def _die(self, error: ExecutorError, *, tell: bool) -> None:
        with self._lock:
            first, self._dead = self._dead is None, self._dead or error
            waiting = [call for pending in self._pending for call in pending]
        for call in waiting:
            if not call.future.done():
                call.future.set_exception(self._dead)
        if tell and first:
            for callback in self._callbacks:
                callback(self._dead)

    # --- in the worker's process

    @classmethod
    def serve_process(cls, pipe: Connection, make_worker: Maker, rank: int, search_path: Sequence[str]) -> None:
        """Answer calls until there are no more."""
        sys.path[:] = search_path
        worker: Worker | None = None
        while True:
            try:
                method, args = pipe.recv()
            except EOFError:
                method, args = None, ()
            if method is None:
                if worker is not None:
                    worker.shutdown()
                return
            try:
                if method == "start":
                    worker = make_worker(rank)
                answer = True, cls.answer(worker, method, args)
            except Exception as error:
                answer = False, cls.packed(error, rank)
            pipe.send_bytes(pickle.dumps(answer))

    @classmethod
    def answer(cls, worker: Any, method: str, args: tuple[Any, ...]) -> Any:
        function = cls.method(worker, method)
        given = function(*args)
        return given.result() if isinstance(given, Future) else given

    @classmethod
    def method(cls, worker: Any, name: str) -> Callable[..., Any]:
        found = getattr(worker, name, None)
        if name.startswith("_") or not callable(found):
            raise ExecutorError(f"the worker has no method {name!r}")
        return cast(Callable[..., Any], found)

    @classmethod
    def packed(cls, error: Exception, rank: int) -> Exception:
        """The exception as it can be sent: with its rank and its traceback, as itself where pickle can carry it."""
        text = "".join(traceback.format_exception(error))
        error.add_note(f"raised on rank {rank}:\n{text}")
        try:
            return cast(Exception, pickle.loads(pickle.dumps(error)))
        except Exception:
            return ExecutorError(f"rank {rank}: {type(error).__name__}: {error}\n{text}")


def mapped(source: Future[Any], function: Callable[[Any], Any]) -> Future[Any]:
    """A future of what `function` makes of another's result."""
    made: Future[Any] = Future()

    def pass_on(ended: Future[Any]) -> None:
        error = ended.exception()
        if error is not None:
            made.set_exception(error)
        else:
            made.set_result(function(ended.result()))

    source.add_done_callback(pass_on)
    return made
