"""The in-process executor: one worker, whose steps run in order on a thread of their own.

On CPU the thread is what lets the engine schedule step N+1 while step N computes. On CUDA a launch returns before the
device is done, so a thread would only contend for the interpreter: steps are launched where they are scheduled.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from enginebay.errors import ExecutorError
from enginebay.interfaces.executor import Executor, ExecutorContext, KVCacheSpec, Worker
from enginebay.interfaces.scheduler import ModelOutput, SchedulerOutput

T = TypeVar("T")


class UniprocExecutor(Executor):
    """Runs rank 0 here."""

    def __init__(self, context: ExecutorContext) -> None:
        super().__init__(context)
        threaded = context.device == "cpu" and context.max_concurrent_batches > 1
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="enginebay-worker") if threaded else None
        self._worker: Worker | None = None

    def start(self) -> None:
        """Make the worker and load the model."""
        self._worker = _run(self.context.make_worker, 0)
        self._call(self._worker.start)

    def kv_cache_spec(self) -> KVCacheSpec:
        """The worker's."""
        return self._call(self._require().kv_cache_spec)

    def available_kv_memory(self) -> int:
        """The worker's, in bytes."""
        return self._call(self._require().available_kv_memory)

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocate the worker's cache."""
        self._call(self._require().initialize_kv_cache, num_blocks)

    def execute_model(self, output: SchedulerOutput) -> Future[None]:
        """Start a step."""
        return self._submit(self._require().execute_model, output)

    def sample(self) -> Future[ModelOutput]:
        """Sample the step started last."""
        worker = self._require()
        if self._thread is not None:
            return self._thread.submit(_run, lambda: worker.sample().result())
        try:
            return _run(worker.sample)
        except Exception as error:
            failed: Future[ModelOutput] = Future()
            failed.set_exception(error)
            return failed

    def collective_rpc(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call the worker's `method` after the steps in flight; no bound can be kept in the caller's thread."""
        function = getattr(self._require(), method, None)
        if method.startswith("_") or not callable(function):
            raise ExecutorError(f"the worker has no method {method!r}")
        if timeout_s is not None and self._thread is None:
            raise ExecutorError(
                f"rank 0 runs in the caller's thread, so {method} cannot be bounded; leave timeout_s out"
            )
        answer = self._submit(function, *args)
        try:
            return [answer.result(timeout_s)]
        except TimeoutError:
            if answer.done():  # the worker's own
                raise
            raise ExecutorError(f"rank 0: {method} has not answered within {timeout_s} s; it goes on") from None

    def check_health(self) -> None:
        """A worker in this process is gone only after `shutdown`."""
        self._require()

    def shutdown(self) -> None:
        """Let the step in flight end and drop the worker."""
        worker, self._worker = self._worker, None
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        if worker is not None:
            worker.shutdown()

    def _require(self) -> Worker:
        if self._worker is None:
            raise ExecutorError("rank 0: the worker is not running")
        return self._worker

    def _submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        if self._thread is not None:
            return self._thread.submit(_run, function, *args)
        future: Future[T] = Future()
        try:
            future.set_result(_run(function, *args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _call(self, function: Callable[..., T], *args: Any) -> T:
        return self._submit(function, *args).result()


def _run(function: Callable[..., T], *args: Any) -> T:
    """Call the worker's; what it raises says whose it is."""
    try:
        return function(*args)
    except Exception as error:
        error.add_note("raised by the worker of rank 0")
        raise
