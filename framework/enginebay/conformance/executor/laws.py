"""The laws of an executor. Its workers are fakes, so that what is seen is the executor's own doing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from enginebay.conformance.claims import require_accepted, require_refused
from enginebay.conformance.executor.fake_worker import (
    Fault,
    Script,
    TwoArguments,
    Unsendable,
    WorkerFault,
    cache_spec,
    installed_plugins,
    place,
)
from enginebay.conformance.executor.left_behind import Snapshot, can_be_seen, left_since
from enginebay.conformance.executor.steps import answer, digest, step
from enginebay.conformance.executor.trial import Arrangement, Trial, check_is, make, text_of, trial
from enginebay.conformance.suite import Conformance, Settings, cases_from
from enginebay.errors import ExecutorError
from enginebay.interfaces.executor import Executor
from enginebay.interfaces.scheduler import ModelOutput
from enginebay.plugins.records import ExecutorRecord, Kind
from enginebay.plugins.requirements import Hardware, Requirements


@dataclass(frozen=True)
class Undeclared:
    """A demand that a record does not declare."""

    what: str
    requirements: Requirements

    def __str__(self) -> str:
        return self.what


class ExecutorConformance(Conformance):
    """What every executor keeps, over as many ranks and steps in flight as its record declares."""

    kind: ClassVar[Kind] = "executor"
    decisive: ClassVar[tuple[str, ...]] = ("steps_and_results_pass_unchanged", "results_come_in_the_order_of_calls")

    # --- the record

    @cases_from("arrangements")
    def test_factory_gives_an_executor(self, record: ExecutorRecord, settings: Settings, case: Arrangement) -> None:
        """The factory builds an `Executor` that allows the steps in flight that it was told, and makes no worker yet."""
        with trial(record, settings, case, start=False) as t:
            assert 1 <= t.executor.max_concurrent_batches <= case.depth
            assert t.calls() == [], "a worker was made before start"

    def test_what_is_declared_is_accepted(self, record: ExecutorRecord) -> None:
        """As many ranks as the record declares, on its devices, are refused for nothing but the machine."""
        for device in record.devices:
            for ranks in {1, record.max_world_size or 8}:
                require_accepted(record, _demand(device, ranks))

    @cases_from("undeclared")
    def test_what_is_not_declared_is_refused(self, record: ExecutorRecord, case: Undeclared) -> None:
        """More ranks or another device than the record declares are refused, by a reason that says what would do."""
        require_refused(record, case.requirements, _demand(record.devices[0], 1), case)

    # --- the start

    @cases_from("arrangements")
    def test_every_rank_has_one_worker(self, record: ExecutorRecord, settings: Settings, case: Arrangement) -> None:
        """`start` makes one worker a rank, in the process that it lives in, and starts it once."""
        with trial(record, settings, case) as t:
            assert sorted(t.rpc("whereabouts"))[0][0] == 0
            for rank in t.ranks:
                assert t.calls(rank) == ["make", "start"], f"rank {rank} had the calls {t.calls(rank)}"
                assert len({note.pid for note in t.notes(rank)}) == 1, "a worker was made in another process"
            assert not t.script.notes_file(case.ranks).exists(), f"a worker of rank {case.ranks} was made"

    @cases_from("arrangements")
    def test_cache_calls_pass_unchanged(self, record: ExecutorRecord, settings: Settings, case: Arrangement) -> None:
        """The cache spec is the workers', the memory the least of any worker's, and the number of blocks reaches every rank."""
        for memory in ([2**40 + 9 + rank for rank in range(case.ranks)], [2**40 - rank for rank in range(case.ranks)]):
            with trial(record, settings, case, memory=tuple(memory)) as t:
                assert t.call("kv_cache_spec", t.executor.kv_cache_spec) == cache_spec()
                assert t.call("available_kv_memory", t.executor.available_kv_memory) == min(memory)
                t.call("initialize_kv_cache", t.executor.initialize_kv_cache, 2**33 + 5)
                for rank in t.ranks:
                    given = [note.given for note in t.notes(rank) if note.call == "initialize_kv_cache"]
                    assert given == [2**33 + 5], f"rank {rank} was told {given} blocks"

    @cases_from("several_ranks")
    def test_workers_that_disagree_are_refused(
        self, record: ExecutorRecord, settings: Settings, case: Arrangement
    ) -> None:
        """Cache specs that differ between ranks are an `ExecutorError`, and not the first rank's."""
        with trial(record, settings, case, disagreeing=True) as t:
            assert isinstance(t.failure("kv_cache_spec", t.executor.kv_cache_spec), ExecutorError)

    # --- steps

    @cases_from("arrangements")
    def test_steps_and_results_pass_unchanged(
        self, record: ExecutorRecord, settings: Settings, case: Arrangement
    ) -> None:
        """A step reaches every rank as it was given, and the driver's answer comes back as it was made."""
        with trial(record, settings, case) as t:
            for number in range(4):
                _check_answer(t.run(number), number)
            for rank in t.ranks:
                given = {note.step: note.given for note in t.notes(rank) if note.call == "execute_model"}
                assert given == {number: digest(step(number)) for number in range(4)}, f"rank {rank} got other steps"

    @cases_from("arrangements")
    def test_results_come_in_the_order_of_calls(
        self, record: ExecutorRecord, settings: Settings, case: Arrangement
    ) -> None:
        """With as many steps in flight as allowed, each has its own result; a future is done when a later one is."""
        with trial(record, settings, case, late=True) as t:
            number, last = 0, 12
            while number < last:
                flight: deque[tuple[int, Future[None], Future[ModelOutput]]] = deque()
                while len(flight) < t.depth:
                    flight.append((number, *t.launch(number)))
                    number += 1
                _check_answer(t.result(flight[-1][2]), number - 1)
                for launched, executed, sampled in flight:
                    assert executed.done(), f"step {launched} is not done, a later one is"
                    assert sampled.done(), f"the result of step {launched} is not there, a later one's is"
                    _check_answer(t.result(sampled), launched)
            wanted = [(call, n) for n in range(number) for call in ("execute_model", "sample")]
            for rank in t.ranks:
                had = [(note.call, note.step) for note in t.notes(rank) if note.step is not None]
                assert had == wanted, f"rank {rank} had its calls in another order: {had}"

    @cases_from("overlapping")
    def test_calls_return_while_a_step_runs(
        self, record: ExecutorRecord, settings: Settings, case: Arrangement
    ) -> None:
        """Steps up to the declared number are taken while the first still runs; nothing is done before it is."""
        with trial(record, settings, case, gated=(0,)) as t:
            assert t.depth == case.depth, f"max_concurrent_batches is {t.depth}, the record declares {case.depth}"
            began = time.monotonic()
            futures: list[Future[Any]] = [future for n in range(case.depth) for future in t.launch(n)]
            took = time.monotonic() - began
            assert took < 5, f"the calls took {took:.1f} s, until the step gave up waiting"
            assert not any(future.done() for future in futures)
            t.script.open_gate()
            _check_answer(t.result(futures[-1]), case.depth - 1)

    @cases_from("arrangements")
    def test_a_failed_step_holds_up_nothing(
        self, record: ExecutorRecord, settings: Settings, case: Arrangement
    ) -> None:
        """A step that fails, in execute_model or in sample, ends its own futures; the next steps and calls go on."""
        rank = case.ranks - 1
        faults = (Fault("execute_model", rank, 1), Fault("sample", rank, 4))
        with trial(record, settings, case, faults=faults) as t:
            for first in range(0, 8, t.depth):
                flight = [(n, *t.launch(n)) for n in range(first, first + t.depth)]
                for number, executed, sampled in flight:
                    if number == 1:
                        assert t.failure("the failing step", lambda future=executed: future)
                    if number in (1, 4):
                        assert t.failure("the failing step's sample", lambda future=sampled: future)
                    else:
                        _check_answer(t.result(sampled), number)
            assert len(t.rpc("echo")) == case.ranks
            t.call("check_health", t.executor.check_health)

    # --- exceptions

    @cases_from("arrangements")
    def test_a_workers_exception_reaches_the_caller(
        self, record: ExecutorRecord, settings: Settings, case: Arrangement
    ) -> None:
        """It has its type and message, the rank that raised it, and the worker's traceback, whichever call it came from."""
        rank = case.ranks - 1
        execute, sample = Fault("execute_model", rank, 0, "own"), Fault("sample", rank, 1)
        memory, call = Fault("available_kv_memory", rank), Fault("fail", rank, error="own")
        with trial(record, settings, case, faults=(execute, sample, memory)) as t:
            check_is(t.failure("execute_model", t.executor.execute_model, step(0)), execute, WorkerFault)
            t.result(t.call("execute_model", t.executor.execute_model, step(1)))
            check_is(t.failure("sample", t.executor.sample), sample)
            check_is(t.failure("available_kv_memory", t.executor.available_kv_memory), memory)
            check_is(t.failure("collective_rpc", t.executor.collective_rpc, "fail", "own", rank), call, WorkerFault)

    @cases_from("arrangements")
    def test_an_exception_that_cannot_be_sent_is_quoted(
        self, record: ExecutorRecord, settings: Settings, case: Arrangement
    ) -> None:
        """An exception that pickle cannot carry comes as itself or as an `ExecutorError` that quotes it, and breaks nothing."""
        with trial(record, settings, case) as t:
            for kind, own in (("unsendable", Unsendable), ("unreadable", TwoArguments)):
                error = t.failure("collective_rpc", t.executor.collective_rpc, "fail", kind, case.ranks - 1)
                assert isinstance(error, ExecutorError | own), f"an {own.__name__} came as {error!r}"
                said = text_of(error)
                for word in (own.__name__, "fails on purpose", f"rank {case.ranks - 1}", "_fails_inside_the_worker"):
                    assert word in said, f"{word!r} is lost:\n{said}"
                assert len(t.rpc("echo")) == case.ranks

    # --- calls by name

    @cases_from("arrangements")
    def test_rpc_reaches_every_rank(self, record: ExecutorRecord, settings: Settings, case: Arrangement) -> None:
        """`collective_rpc` gives each rank the arguments, after the steps in flight, and returns the answers by rank."""
        with trial(record, settings, case) as t:
            futures = [t.launch(n) for n in range(t.depth)]
            given = ("word", 2**70, {"a": [1.5, None]}, np.arange(5, dtype=np.int16))
            answers = t.rpc("echo", *given)
            assert [rank for rank, _ in answers] == list(t.ranks)
            for rank, args in answers:
                assert digest(list(args)) == digest(list(given)), f"rank {rank} was given {args!r}"
                had = [note.call for note in t.notes(rank)]
                assert had.count("execute_model") == had.count("sample") == t.depth, (
                    "the call ran before a step in flight"
                )
                assert had[-1] == "echo"
            for number, (_, sampled) in enumerate(futures):
                _check_answer(t.result(sampled), number)

    @cases_from("arrangements")
    def test_rpc_of_no_method_is_refused(self, record: ExecutorRecord, settings: Settings, case: Arrangement) -> None:
        """A name that is no public method of the worker is an `ExecutorError` with that name, and no harm is done."""
        with trial(record, settings, case) as t:
            before = t.calls()
            for method in ("no_such_method", "_enter", "__init__", "attribute"):
                error = t.failure(f"collective_rpc({method!r})", t.executor.collective_rpc, method, "note")
                assert isinstance(error, ExecutorError), f"collective_rpc({method!r}) raised {error!r}"
                assert method in str(error)
            assert t.calls() == before, "the worker was called all the same"
            assert len(t.rpc("echo")) == case.ranks

    @cases_from("arrangements")
    def test_rpc_keeps_its_timeout(self, record: ExecutorRecord, settings: Settings, case: Arrangement) -> None:
        """After `timeout_s` an `ExecutorError` names the call, which ends on its own; who cannot keep to it refuses first."""
        with trial(record, settings, case) as t:
            began = time.monotonic()
            error = t.failure("collective_rpc", t.executor.collective_rpc, "nap", 1.2, timeout_s=0.2)
            took = time.monotonic() - began
            assert isinstance(error, ExecutorError), repr(error)
            assert "nap" in str(error)
            assert took < 1, f"it took {took:.1f} s, the call 1.2 s"
            assert len(t.rpc("echo")) == case.ranks
            _check_answer(t.run(0), 0)

    # --- health and death

    @cases_from("arrangements")
    def test_there_is_no_false_alarm(self, record: ExecutorRecord, settings: Settings, case: Arrangement) -> None:
        """While its workers live, check_health raises nothing, and no callback is told of a failed step or of the end."""
        told: list[BaseException] = []
        with trial(record, settings, case, faults=(Fault("execute_model", 0, 0),)) as t:
            t.executor.on_failure(told.append)
            t.failure("execute_model", t.executor.execute_model, step(0))
            t.call("check_health", t.executor.check_health)
            t.run(1)
            t.shutdown()
            time.sleep(0.1)
        assert told == [], f"the callback was told of {told}"

    @cases_from("arrangements")
    def test_a_death_is_told_once(self, record: ExecutorRecord, settings: Settings, case: Arrangement) -> None:
        """When a worker's process dies, the callback is told its rank in seconds, once; check_health raises from then on."""
        told: list[BaseException] = []
        heard = threading.Event()

        def tell(error: BaseException) -> None:
            told.append(error)
            heard.set()

        with trial(record, settings, case) as t:
            pids = _workers_elsewhere(t)
            t.executor.on_failure(tell)
            t.run(0)
            os.kill(pids[-1], signal.SIGKILL)
            assert heard.wait(10), "10 s after the death nobody had been told"
            error = t.failure("check_health", t.executor.check_health)
            for said in (told[0], error):
                assert isinstance(said, ExecutorError), repr(said)
                assert f"rank {case.ranks - 1}" in str(said)
            t.failure("a step of the dead", lambda: t.launch(1)[1])
        time.sleep(0.1)
        assert len(told) == 1, f"the callback was called {len(told)} times"

    @cases_from("arrangements")
    def test_a_death_ends_what_waits(self, record: ExecutorRecord, settings: Settings, case: Arrangement) -> None:
        """When a worker dies amid a step, futures and later calls end with an `ExecutorError`, and shutdown ends the others."""
        with trial(record, settings, case, gated=(0,)) as t:
            pids = _workers_elsewhere(t)
            futures: list[Future[Any]] = [future for n in range(t.depth) for future in t.launch(n)]
            os.kill(pids[-1], signal.SIGKILL)
            for future in futures:
                error = t.failure("a future of the dead", lambda waiting=future: waiting)
                assert isinstance(error, ExecutorError), f"a future ended with {error!r}"
            for what, call in _calls(t.executor):
                assert isinstance(t.failure(f"{what} after the death", call), ExecutorError)
            processes = t.processes()
            t.script.open_gate()
            t.shutdown()
            assert not [p for p in processes if not _gone(p)], "worker processes were left"

    @cases_from("arrangements")
    def test_workers_find_the_engines_plugins(
        self,
        record: ExecutorRecord,
        settings: Settings,
        case: Arrangement,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        """Every worker's process finds the plugins that the engine's finds, those on its sys.path included (C10)."""
        info = tmp_path / "enginebay_found_by_path-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: enginebay-found-by-path\nVersion: 1.5\n")
        (info / "RECORD").write_text("")
        (info / "entry_points.txt").write_text("[enginebay.scheduler]\nfound_by_path = nowhere\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        with trial(record, settings, case) as t:
            _workers_elsewhere(t)
            own = installed_plugins()
            assert ("scheduler", "found_by_path", "enginebay-found-by-path", "1.5") in own
            for rank, found in enumerate(t.rpc("installed_plugins")):
                assert sorted(map(tuple, found)) == sorted(own), f"rank {rank} finds other plugins than the engine"

    # --- the end

    @cases_from("arrangements")
    def test_shutdown_ends_every_worker(self, record: ExecutorRecord, settings: Settings, case: Arrangement) -> None:
        """`shutdown` calls every worker's once and last; called again it does nothing."""
        with trial(record, settings, case) as t:
            t.run(0)
            for _ in range(2):
                t.shutdown()
                for rank in t.ranks:
                    calls = t.calls(rank)
                    assert calls.count("shutdown") == 1, (
                        f"shutdown of rank {rank} was called {calls.count('shutdown')} times"
                    )
                    assert calls[-1] == "shutdown"

    @cases_from("overlapping")
    def test_shutdown_ends_what_waits(self, record: ExecutorRecord, settings: Settings, case: Arrangement) -> None:
        """Steps in flight are done when `shutdown` returns: with their result, cancelled, or with an error."""
        with trial(record, settings, case, gated=(0,)) as t:
            futures: list[Future[Any]] = [future for n in range(t.depth) for future in t.launch(n)]
            opener = threading.Timer(0.2, t.script.open_gate)
            opener.start()
            t.shutdown()
            opener.join()
            assert all(future.done() for future in futures), "a future waits for ever after shutdown"

    @cases_from("arrangements")
    def test_use_out_of_time_is_refused(self, record: ExecutorRecord, settings: Settings, case: Arrangement) -> None:
        """Before `start` and after `shutdown` every call is an `ExecutorError`, at once; `shutdown` itself is harmless."""
        with trial(record, settings, case, start=False) as t:
            _check_refused(t, "before start")
            t.start()
            t.run(0)
            t.shutdown()
            _check_refused(t, "after shutdown")
        with trial(record, settings, case, start=False) as t:
            t.shutdown()
            assert t.calls() == []

    @cases_from("arrangements")
    def test_nothing_is_left_behind(self, record: ExecutorRecord, settings: Settings, case: Arrangement) -> None:
        """After `shutdown` no thread, process, open file, shared memory or socket is left that a first life had not left."""
        _skip_unless_seen()
        for life in range(
            2
        ):  # what is made once a process, such as a pool of threads for arithmetic, is not held against it
            before = Snapshot.take()
            with trial(record, settings, case) as t:
                t.call("initialize_kv_cache", t.executor.initialize_kv_cache, 4)
                for number in range(3):
                    t.run(number)
                t.rpc("echo", bytes(2**20))
                processes = t.processes()
                t.shutdown()
                if life:
                    assert left_since(before, processes) == []

    @cases_from("arrangements")
    def test_a_failed_start_leaves_nothing(self, record: ExecutorRecord, settings: Settings, case: Arrangement) -> None:
        """A worker that cannot be made or started is reported as it failed, and nothing of it or the others is left."""
        _skip_unless_seen()
        for life in range(2):
            before = Snapshot.take()
            for call in ("make", "start"):
                fault = Fault(call, case.ranks - 1)
                with trial(record, settings, case, start=False, faults=(fault,)) as t:
                    check_is(t.failure("start", t.executor.start), fault)
                    processes = t.processes()
                    t.shutdown()
                    if life:
                        assert left_since(before, processes) == []

    @cases_from("arrangements")
    def test_two_executors_keep_apart(
        self, record: ExecutorRecord, settings: Settings, case: Arrangement, tmp_path: Path
    ) -> None:
        """Two executors of one process have workers, names and addresses of their own: one's end does not touch the other."""
        with trial(record, settings, case) as first:
            first.run(0)
            second = make(record, settings, case, Script(str(tmp_path)))
            try:
                second.start()
                _check_answer(second.run(1), 1)
                _check_answer(first.run(2), 2)
            finally:
                second.shutdown()
            _check_answer(first.run(3), 3)
            for t, numbers in ((first, [0, 2, 3]), (second, [1])):
                had = [note.step for note in t.notes() if note.call == "execute_model"]
                assert had == numbers, f"the steps {numbers} of one executor became {had}"

    # --- cases

    @classmethod
    def arrangements(cls, record: ExecutorRecord, settings: Settings) -> list[Arrangement]:
        """One rank and several, one step in flight and as many as declared."""
        deep, most = record.max_concurrent_batches, record.max_world_size or 4
        found = [Arrangement(1, 1), Arrangement(1, deep)]
        found += [Arrangement(ranks, deep) for ranks in ((2, 4) if settings.level == "full" else (2,)) if ranks <= most]
        return list(dict.fromkeys(found))

    @classmethod
    def several_ranks(cls, record: ExecutorRecord, settings: Settings) -> list[Arrangement]:
        """Those of several ranks."""
        return [case for case in cls.arrangements(record, settings) if case.ranks > 1]

    @classmethod
    def overlapping(cls, record: ExecutorRecord, settings: Settings) -> list[Arrangement]:
        """Those of several steps in flight; on a GPU a launch may be made by the caller, since it does not wait."""
        if settings.device != "cpu":
            return []
        return [case for case in cls.arrangements(record, settings) if case.depth > 1]

    @classmethod
    def undeclared(cls, record: ExecutorRecord, settings: Settings) -> list[Undeclared]:
        """What the record lacks."""
        home = record.devices[0]
        found = [
            Undeclared(f"device {other}", _demand(other, 1)) for other in sorted({"cpu", "cuda"} - {*record.devices})
        ]
        if most := record.max_world_size:
            found.append(Undeclared(f"tensor {most + 1}", _demand(home, most + 1)))
            found.append(Undeclared(f"pipeline {most + 1}", replace(_demand(home, 1), pipeline_parallel=most + 1)))
        return found


def _demand(device: str, ranks: int) -> Requirements:
    here = Hardware(device=device, capability=(9, 0) if device == "cuda" else None)
    return Requirements(hardware=here, dtype="float32", kv_dtype="float32", tensor_parallel=ranks)


def _check_answer(given: ModelOutput, number: int) -> None:
    wanted = answer(step(number))
    assert digest(given) == digest(wanted), f"step {number} was answered with {given!r} instead of {wanted!r}"


def _calls(executor: Executor) -> list[tuple[str, Any]]:
    """Every call but start and shutdown."""
    return [
        ("check_health", executor.check_health),
        ("kv_cache_spec", executor.kv_cache_spec),
        ("available_kv_memory", executor.available_kv_memory),
        ("initialize_kv_cache", lambda: executor.initialize_kv_cache(3)),
        ("execute_model", lambda: executor.execute_model(step(0))),
        ("sample", executor.sample),
        ("collective_rpc", lambda: executor.collective_rpc("echo")),
    ]


def _check_refused(t: Trial, when: str) -> None:
    for what, call in _calls(t.executor):
        error = t.failure(f"{what} {when}", call)
        assert isinstance(error, ExecutorError), f"{what} {when} raised {error!r}"
        assert str(error), f"{what} {when} is refused without a word"


def _workers_elsewhere(t: Trial) -> list[int]:
    """The workers' processes by rank; skips where they live in this one, or where it could not end them."""
    found = sorted(map(tuple, t.rpc("whereabouts")))
    if any(there != place() for _, _, there in found):
        pytest.skip("the workers live on another machine, or in a container of their own")
    pids = [pid for _, pid, _ in found]
    if os.getpid() in pids:
        pytest.skip("the workers live in the engine's own process, and die with it")
    return pids


def _gone(process: Any) -> bool:
    end = time.monotonic() + 3
    while process.exists and time.monotonic() < end:
        time.sleep(0.02)
    return not process.exists


def _skip_unless_seen() -> None:
    if not can_be_seen():
        pytest.skip("this system does not say what a process has open")
