"""The in-process executor: order, exceptions, its thread, its end."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from enginebay.errors import ExecutorError
from enginebay.interfaces.executor import ExecutorContext, KVCacheSpec
from enginebay.interfaces.scheduler import ModelOutput, SchedulerOutput
from enginebay.plugins.records import NHD, ExecutorRecord
from enginebay_uniproc import enginebay_executors
from enginebay_uniproc.executor import UniprocExecutor
from pydantic import BaseModel

SPEC = KVCacheSpec(groups=(), block_size=16, kv_dtype="float32", layout=NHD)


class NoOptions(BaseModel):
    pass


class FakeWorker:
    """Notes every call with the name of its thread; a step may wait for a gate or fail."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls: list[tuple[str, Any]] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.fails_at = -1
        self.step = -1
        self.attribute = 3

    def _note(self, name: str, argument: Any = None) -> None:
        self.calls.append((name, argument))
        self.threads.add(threading.get_ident())

    def start(self) -> None:
        self._note("start")

    def kv_cache_spec(self) -> KVCacheSpec:
        self._note("kv_cache_spec")
        return SPEC

    def available_kv_memory(self) -> int:
        self._note("available_kv_memory")
        return 12345

    def kv_budget(self) -> None:
        self._note("kv_budget")

    def initialize_kv_cache(self, num_blocks: int) -> None:
        self._note("initialize_kv_cache", num_blocks)

    def execute_model(self, output: SchedulerOutput) -> None:
        assert self.gate.wait(30)
        self._note("execute_model", output.step)
        self.step = output.step
        if output.step == self.fails_at:
            raise ValueError(f"step {output.step} fails")

    def sample(self) -> Future[ModelOutput]:
        self._note("sample", self.step)
        future: Future[ModelOutput] = Future()
        future.set_result(ModelOutput(np.array([[self.step]], dtype=np.int32), np.ones(1, dtype=np.int32)))
        return future

    def shutdown(self) -> None:
        self._note("shutdown")

    def add(self, left: int, right: int) -> int:
        self._note("add", self.step)
        return left + right


def step(number: int) -> SchedulerOutput:
    one, zero = np.ones(1, dtype=np.int32), np.zeros(1, dtype=np.int32)
    return SchedulerOutput(
        step=number,
        new_requests=[],
        slots=zero,
        num_scheduled_tokens=one,
        num_computed_tokens=zero,
        num_decode_rows=1,
        samples=np.ones(1, dtype=np.bool_),
        output_index=zero,
        new_blocks=(),
    )


def make(device: str = "cpu", batches: int = 2, *, start: bool = True) -> tuple[UniprocExecutor, list[FakeWorker]]:
    workers: list[FakeWorker] = []

    def make_worker(rank: int) -> FakeWorker:
        workers.append(FakeWorker(rank))
        return workers[-1]

    executor = UniprocExecutor(
        ExecutorContext(
            make_worker=make_worker, world_size=1, device=device, max_concurrent_batches=batches, options=NoOptions()
        )
    )
    if start:
        executor.start()
    return executor, workers


def test_the_record_makes_the_executor() -> None:
    (record,) = enginebay_executors()
    assert isinstance(record, ExecutorRecord)
    assert (record.name, record.max_world_size, record.max_concurrent_batches) == ("uniproc", 1, 2)
    context = make(start=False)[0].context
    executor = record.factory(context)
    assert isinstance(executor, UniprocExecutor)
    executor.shutdown()


@pytest.mark.parametrize("batches", [1, 2])
def test_calls_reach_rank_0_in_order(batches: int) -> None:
    executor, (worker,) = make(batches=batches)
    assert executor.max_concurrent_batches == batches
    assert executor.kv_cache_spec() is SPEC
    assert executor.available_kv_memory() == 12345
    executor.initialize_kv_cache(7)
    futures = [(executor.execute_model(step(n)), executor.sample()) for n in range(3)]
    for number, (executed, sampled) in enumerate(futures):
        assert executed.result(30) is None
        assert sampled.result(30).token_ids.tolist() == [[number]]
    assert executor.collective_rpc("add", 2, 3) == [5]
    executor.check_health()
    executor.shutdown()
    assert worker.rank == 0
    assert worker.calls == [
        ("start", None),
        ("kv_cache_spec", None),
        ("available_kv_memory", None),
        ("initialize_kv_cache", 7),
        *((name, n) for n in range(3) for name in ("execute_model", "sample")),
        ("add", 2),
        ("shutdown", None),
    ]


def test_two_batches_on_cpu_run_beside_the_caller() -> None:
    executor, (worker,) = make("cpu", 2)
    worker.gate.clear()
    futures: list[Future[Any]] = [
        executor.execute_model(step(0)),
        executor.sample(),
        executor.execute_model(step(1)),
        executor.sample(),
    ]
    assert not any(future.done() for future in futures)  # the caller came back while step 0 waits
    worker.gate.set()
    futures[-1].result(30)
    assert all(future.done() for future in futures)
    assert len(worker.threads) == 1
    assert threading.get_ident() not in worker.threads
    executor.shutdown()


@pytest.mark.parametrize(("device", "batches"), [("cpu", 1), ("cuda", 1), ("cuda", 2)])
def test_otherwise_steps_run_where_they_are_scheduled(device: str, batches: int) -> None:
    executor, (worker,) = make(device, batches)
    assert executor.execute_model(step(0)).done()
    assert executor.sample().done()
    assert worker.threads == {threading.get_ident()}
    executor.shutdown()


@pytest.mark.parametrize("batches", [1, 2])
def test_an_exception_passes_through_the_future(batches: int) -> None:
    executor, (worker,) = make(batches=batches)
    worker.fails_at = 1
    assert executor.execute_model(step(0)).result(30) is None
    failed = executor.execute_model(step(1))
    with pytest.raises(ValueError, match="step 1 fails"):
        failed.result(30)
    executor.shutdown()


@pytest.mark.parametrize("batches", [1, 2])
def test_rpc_runs_between_steps_and_raises_what_the_worker_raised(batches: int) -> None:
    executor, (worker,) = make(batches=batches)
    executor.execute_model(step(4))
    assert executor.collective_rpc("add", 1, 1) == [2]
    assert worker.calls[-2:] == [("execute_model", 4), ("add", 4)]
    with pytest.raises(TypeError):
        executor.collective_rpc("add", 1, None)
    executor.shutdown()


@pytest.mark.parametrize("method", ["_note", "__init__", "no_such_method", "attribute"])
def test_rpc_of_a_private_or_unknown_method_is_refused(method: str) -> None:
    executor, (worker,) = make()
    calls = list(worker.calls)
    with pytest.raises(ExecutorError, match=f"no method '{method}'"):
        executor.collective_rpc(method, "x")
    assert worker.calls == calls
    executor.shutdown()


@pytest.mark.parametrize("batches", [1, 2])
def test_what_a_worker_raises_bears_its_rank_in_whichever_call(batches: int) -> None:
    executor, (worker,) = make(batches=batches)
    worker.sample = lambda: 1 // 0  # type: ignore[method-assign, assignment, return-value]
    executor.execute_model(step(0)).result(30)
    sampled = executor.sample()
    with pytest.raises(ZeroDivisionError) as raised:
        sampled.result(30)
    assert "raised by the worker of rank 0" in raised.value.__notes__
    executor.shutdown()


def test_an_rpc_is_bounded_where_the_worker_has_a_thread() -> None:
    executor, (worker,) = make()
    worker.gate.clear()
    executor.execute_model(step(0))
    with pytest.raises(ExecutorError, match=r"add has not answered within 0\.05 s"):
        executor.collective_rpc("add", 1, 2, timeout_s=0.05)
    worker.gate.set()
    assert executor.collective_rpc("add", 1, 2, timeout_s=30) == [3]
    executor.shutdown()


def test_an_rpc_in_the_callers_thread_refuses_a_bound() -> None:
    executor, (worker,) = make(batches=1)
    with pytest.raises(ExecutorError, match="leave timeout_s out"):
        executor.collective_rpc("add", 1, 2, timeout_s=30)
    assert worker.calls == [("start", None)]
    executor.shutdown()


@pytest.mark.parametrize("batches", [1, 2])
def test_shutdown_twice_ends_the_worker_once(batches: int) -> None:
    executor, (worker,) = make(batches=batches)
    executor.shutdown()
    executor.shutdown()
    assert [name for name, _ in worker.calls].count("shutdown") == 1
    for call in (
        executor.check_health,
        executor.sample,
        executor.kv_cache_spec,
        lambda: executor.execute_model(step(0)),
        lambda: executor.collective_rpc("add", 1, 2),
    ):
        with pytest.raises(ExecutorError, match="rank 0: the worker is not running"):
            call()


def test_shutdown_lets_the_step_in_flight_end_and_cancels_those_behind_it() -> None:
    executor, (worker,) = make()
    worker.gate.clear()
    running = executor.execute_model(step(0))
    while not running.running():
        threading.Event().wait(0.001)
    behind = executor.execute_model(step(1))
    opener = threading.Timer(0.05, worker.gate.set)
    opener.start()
    executor.shutdown()
    opener.join()
    assert running.result(30) is None
    assert behind.cancelled()
    assert worker.calls[-2:] == [("execute_model", 0), ("shutdown", None)]


def test_calls_before_start_are_refused_and_shutdown_is_harmless() -> None:
    executor, workers = make(start=False)
    with pytest.raises(ExecutorError, match="not running"):
        executor.check_health()
    executor.shutdown()
    assert workers == []
