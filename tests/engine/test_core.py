"""The engine core over a fake executor and scheduler: order of steps, failure, watchdog, observers (C22)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, cast

import numpy as np
import pluggy
import pytest
from enginebay import hookimpl
from enginebay.config import EngineConfig, ResolvedConfig
from enginebay.engine.core import EngineCore, EngineInfo, StepInfo
from enginebay.errors import EngineDeadError, RequestError
from enginebay.interfaces.executor import Executor, ExecutorContext, KVCacheSpec
from enginebay.interfaces.scheduler import (
    KVCacheManager,
    ModelOutput,
    Request,
    RequestOutputDelta,
    Scheduler,
    SchedulerOutput,
    SchedulerStats,
)
from enginebay.plugins import hookspecs
from enginebay.plugins.observers import Observers
from enginebay.sampling.params import SamplingParams
from pydantic import BaseModel


class NoOptions(BaseModel):
    pass


class FakeExecutor(Executor):
    """Notes launches; a step's sampling ends when it is asked for, and may raise what `faults` holds."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(
            ExecutorContext(
                make_worker=lambda rank: pytest.fail("no worker is made"),
                world_size=1,
                device="cpu",
                max_concurrent_batches=2,
                options=NoOptions(),
            )
        )
        self.log = log
        self.step = -1
        #: (call, step) -> what it raises; each is raised once
        self.faults: dict[tuple[str, int], BaseException] = {}
        self.shutdowns = 0

    def start(self) -> None:
        pytest.fail("the core is given a started executor")

    def kv_cache_spec(self) -> KVCacheSpec:
        pytest.fail("the core does not know the cache")

    def available_kv_memory(self) -> int:
        pytest.fail("the core does not know the cache")

    def initialize_kv_cache(self, num_blocks: int) -> None:
        pytest.fail("the core does not know the cache")

    def collective_rpc(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        return []

    def check_health(self) -> None:
        pass

    def execute_model(self, output: SchedulerOutput) -> Future[None]:
        self.step = output.step
        self.log.append(f"launch {output.step}")
        if fault := self.faults.pop(("launch", self.step), None):
            raise fault
        future: Future[None] = Future()
        if fault := self.faults.pop(("execute", self.step), None):
            future.set_exception(fault)
            return future
        return LazyFuture(self, "late", self.step, None)

    def sample(self) -> Future[ModelOutput]:
        self.log.append(f"sample {self.step}")
        ids = np.array([[self.step]], dtype=np.int32)
        return LazyFuture(self, "wait", self.step, ModelOutput(ids, np.ones(1, dtype=np.int32)))

    def shutdown(self) -> None:
        self.log.append("shutdown")
        self.shutdowns += 1
        if fault := self.faults.pop(("shutdown", 0), None):
            raise fault


class LazyFuture(Future[Any]):
    """Ends when its result is asked for, as a device's copy does."""

    def __init__(self, executor: FakeExecutor, call: str, step: int, value: Any) -> None:
        super().__init__()
        self._place = (executor, call, step)
        self._value = value

    def result(self, timeout: float | None = None) -> Any:
        executor, call, step = self._place
        if fault := executor.faults.pop((call, step), None):
            raise fault
        return self._value


class FakeScheduler(Scheduler):
    """Composes `steps` steps of one row; the last one ends the request."""

    def __init__(self, log: list[str], steps: int) -> None:
        self.log = log
        self.left = steps
        self.next = 0
        self.out: deque[SchedulerOutput] = deque()
        self.added: list[Request] = []
        self.aborted: list[str] = []
        self.waiting = 0
        self.fails: Exception | None = None

    def add(self, request: Request) -> None:
        if request.request_id == "bad":
            raise RequestError("it does not fit")
        self.added.append(request)

    def schedule(self) -> SchedulerOutput | None:
        if self.fails is not None:
            raise self.fails
        if self.left == 0:
            return None
        self.left -= 1
        one, zero = np.ones(1, dtype=np.int32), np.zeros(1, dtype=np.int32)
        true = np.ones(1, dtype=np.bool_)
        self.out.append(SchedulerOutput(self.next, [], zero, one * 3, zero, 0, true, zero, ()))
        self.next += 1
        return self.out[-1]

    def update(self, output: SchedulerOutput, result: ModelOutput) -> list[RequestOutputDelta]:
        assert output is self.out.popleft(), "steps retire oldest first"
        self.log.append(f"retire {output.step}")
        last = self.left == 0 and not self.out
        return [RequestOutputDelta("a", result.token_ids[0].tolist(), "length" if last else None)]

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutputDelta]:
        self.aborted += request_ids
        return [RequestOutputDelta(name, [], "abort") for name in self.aborted]

    def has_unfinished(self) -> bool:
        return bool(self.left or self.out)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(num_waiting=self.waiting, num_free_blocks=3, num_blocks=8)


class FakeCache:
    """Block accounting of which the core uses one call."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def reset_prefix_cache(self) -> None:
        self.log.append("reset")


class Listener:
    """An observer of everything."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    @hookimpl
    def enginebay_engine_started(self, engine: Any) -> None:
        self.heard.append(("started", engine))

    @hookimpl
    def enginebay_step_finished(self, step: Any) -> None:
        self.heard.append(("step", step))

    @hookimpl
    def enginebay_request_finished(self, request: Any) -> None:
        self.heard.append(("request", request))

    @hookimpl
    def enginebay_engine_stopped(self, engine: Any) -> None:
        self.heard.append(("stopped", engine))


class Rig:
    def __init__(self, depth: int = 1, steps: int = 3, listener: Listener | None = None) -> None:
        self.log: list[str] = []
        self.executor = FakeExecutor(self.log)
        self.scheduler = FakeScheduler(self.log, steps)
        manager = pluggy.PluginManager("enginebay")
        manager.add_hookspecs(hookspecs)
        if listener is not None:
            manager.register(listener, "listener")
        observers = Observers(manager, ["listener"] if listener is not None else [])
        self.info = make_info()
        cache = cast(KVCacheManager, FakeCache(self.log))
        self.core = EngineCore(self.info, self.executor, self.scheduler, cache, depth, observers)


def make_info() -> EngineInfo:
    return EngineInfo(
        config=EngineConfig(model="none"),
        sources={},
        resolved=ResolvedConfig(
            dtype="float32",
            kv_dtype="float32",
            device="cpu",
            max_model_len=64,
            block_size=16,
            max_num_batched_tokens=32,
        ),
        selections=(),
        vocab_size=100,
        eos_token_ids=(2,),
    )


def make_request(name: str = "a") -> Request:
    prompt = np.array([1, 2], dtype=np.int32)
    return Request(name, prompt, SamplingParams(), frozenset(), max_output_tokens=4, seed=0)


def test_depth_1_retires_each_step_before_the_next() -> None:
    rig = Rig(depth=1)
    tokens = [rig.core.step()[0].new_token_ids for _ in range(3)]
    assert tokens == [[0], [1], [2]]
    assert rig.log == [f"{what} {step}" for step in range(3) for what in ("launch", "sample", "retire")]
    assert not rig.core.has_unfinished()


def test_depth_2_launches_the_next_step_before_the_oldest_retires() -> None:
    rig = Rig(depth=2)
    assert run(rig.core) == [[0], [1], [2]]
    assert rig.log == [
        *("launch 0", "sample 0", "launch 1", "sample 1", "retire 0"),
        *("launch 2", "sample 2", "retire 1"),
        "retire 2",
    ]


def test_a_step_without_work_gives_nothing() -> None:
    rig = Rig(steps=0)
    assert rig.core.step() == []
    assert rig.log == []
    rig.core.add_request(make_request())  # and the engine lives on


def test_requests_are_counted_in_order_of_arrival_and_a_refused_one_is_not() -> None:
    rig = Rig()
    for name in ("a", "b"):
        rig.core.add_request(make_request(name))
    with pytest.raises(RequestError, match="does not fit"):
        rig.core.add_request(make_request("bad"))
    rig.core.add_request(make_request("c"))
    assert [(r.request_id, r.arrival) for r in rig.scheduler.added] == [("a", 0), ("b", 1), ("c", 2)]
    assert rig.core.step()[0].new_token_ids == [0]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("call", ["launch", "execute", "late", "wait"])
@pytest.mark.parametrize("step", [0, 1])
def test_a_failing_step_ends_the_engine(depth: int, call: str, step: int) -> None:
    rig = Rig(depth)
    fault = ValueError("the device fell over")
    rig.executor.faults[call, step] = fault
    with pytest.raises(EngineDeadError, match="ValueError: the device fell over") as caught:
        run(rig.core)
    assert caught.value.__cause__ is fault
    assert rig.executor.shutdowns == 1
    if call == "execute":
        assert f"sample {step}" not in rig.log  # a launch that failed at once is not sampled
    check_dead(rig, "the device fell over")


def test_a_failing_scheduler_ends_the_engine() -> None:
    rig = Rig()
    rig.scheduler.fails = KeyError("slot")
    with pytest.raises(EngineDeadError, match="KeyError: 'slot'"):
        rig.core.step()
    check_dead(rig, "slot")


def run(core: EngineCore) -> list[list[int]]:
    tokens = []
    while core.has_unfinished():
        tokens += [delta.new_token_ids for delta in core.step()]
    return tokens


def check_dead(rig: Rig, reason: str) -> None:
    """Every further call says why; nothing reaches scheduler or executor."""
    log = list(rig.log)
    for call in (rig.core.step, lambda: rig.core.add_request(make_request()), rig.core.reset_prefix_cache):
        with pytest.raises(EngineDeadError, match=reason):
            call()
    rig.core.abort(["a"])
    rig.core.shutdown()
    assert not rig.core.has_unfinished()
    assert rig.scheduler.added == []
    assert rig.scheduler.aborted == []
    assert rig.log == log


@pytest.mark.parametrize("call", ["late", "wait"])
def test_an_interrupt_while_waiting_loses_no_step(call: str) -> None:
    rig = Rig(depth=2)
    rig.executor.faults[call, 0] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        rig.core.step()
    assert run(rig.core) == [[0], [1], [2]]
    assert rig.executor.shutdowns == 0


def test_the_watchdog_ends_an_engine_whose_requests_wait_for_ever_c22() -> None:
    rig = Rig(steps=0)
    rig.scheduler.waiting = 2
    with pytest.raises(EngineDeadError, match=r"waiting 2, running 0, .*\(3 of 8 blocks free\)"):
        rig.core.step()
    assert rig.executor.shutdowns == 1
    check_dead(rig, "waiting 2")


def test_the_watchdog_is_silent_while_a_step_is_in_flight_c22() -> None:
    rig = Rig(depth=2, steps=1)
    rig.scheduler.waiting = 2
    assert rig.core.step()[0].new_token_ids == [0]


def test_shutdown_is_idempotent_and_final() -> None:
    rig = Rig(depth=2)
    rig.core.step()
    rig.core.shutdown()
    rig.core.shutdown()
    assert rig.executor.shutdowns == 1
    check_dead(rig, "was shut down; make a new one")


def test_stats_are_the_schedulers() -> None:
    assert Rig().core.stats() == SchedulerStats(num_free_blocks=3, num_blocks=8)


def test_the_prefix_cache_is_reset_in_the_block_accounting() -> None:
    rig = Rig(depth=2)
    rig.core.step()
    rig.core.reset_prefix_cache()
    assert rig.log[-1] == "reset"
    assert run(rig.core) == [[1], [2]]


def test_info_has_one_max_model_len_c7() -> None:
    info = make_info()
    assert info.max_model_len == info.resolved.max_model_len == 64


def test_observers_hear_of_start_steps_requests_and_stop() -> None:
    listener = Listener()
    rig = Rig(depth=2, steps=2, listener=listener)
    assert listener.heard == [("started", rig.info)]
    rig.core.step()
    name, step = listener.heard[-1]
    assert name == "step"
    assert isinstance(step, StepInfo)
    assert (step.index, step.num_rows, step.num_tokens) == (0, 1, 3)
    assert step.duration >= 0.0
    deltas = rig.core.step()
    rig.core.abort(["b"])
    rig.core.shutdown()
    rig.core.shutdown()
    assert [name for name, _ in listener.heard] == ["started", "step", "step", "request", "request", "stopped"]
    assert listener.heard[3][1] is deltas[0]
    assert listener.heard[4][1].finish_reason == "abort"
    assert listener.heard[5][1] is rig.info


def test_observers_hear_that_a_stop_string_is_a_stop() -> None:
    listener = Listener()
    rig = Rig(listener=listener)
    rig.core.abort(["b"], "stop")
    assert listener.heard[-1][1].finish_reason == "stop"


def test_observers_hear_of_the_stop_of_a_failed_engine() -> None:
    listener = Listener()
    rig = Rig(listener=listener)
    rig.executor.faults["wait", 0] = ValueError("gone")
    with pytest.raises(EngineDeadError):
        rig.core.step()
    assert [name for name, _ in listener.heard] == ["started", "stopped"]


def test_a_shutdown_that_fails_too_hides_neither_the_first_fault_nor_the_stop() -> None:
    """A CUDA fault is sticky: freeing the device raises it again."""
    listener = Listener()
    rig = Rig(listener=listener)
    rig.executor.faults["wait", 0] = ValueError("illegal address")
    rig.executor.faults["shutdown", 0] = OSError("still broken")
    with pytest.raises(EngineDeadError, match="ValueError: illegal address") as caught:
        rig.core.step()
    assert caught.value.__notes__ == ["its shutdown failed too: OSError: still broken"]
    assert [name for name, _ in listener.heard] == ["started", "stopped"]
    check_dead(rig, "illegal address")


def test_an_interrupt_amid_a_launch_ends_the_engine_with_the_reason() -> None:
    rig = Rig(depth=2)
    rig.executor.faults["launch", 0] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        rig.core.step()
    assert rig.executor.shutdowns == 1
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt cut a step short"):
        rig.core.step()
