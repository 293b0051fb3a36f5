"""What can be wrong with an executor: one of processes, broken in one way each."""

from __future__ import annotations

import functools
import os
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from enginebay.errors import ExecutorError
from enginebay.interfaces.executor import ExecutorContext, KVCacheSpec
from enginebay.interfaces.scheduler import ModelOutput, SchedulerOutput
from enginebay.plugins.records import ExecutorRecord
from enginebay.plugins.requirements import Reason, Requirements
from mutant import Mutant, accepts_everything
from process_executor import Call, Maker, mapped
from process_executor import ProcessExecutor as Right

RECORD = ExecutorRecord(
    name="processes",
    summary="a process a rank",
    factory=Right,
    api_version=0,
    devices=("cpu",),
    max_world_size=4,
    max_concurrent_batches=2,
)
ORIGINALS = {"cpu": RECORD}


# --- records ---------------------------------------------------------------------------------------------------------


def _no_executor(context: ExecutorContext) -> object:
    return functools.partial(Right, context)


def _wants_one_rank(req: Requirements) -> list[Reason]:
    return [Reason(code="world_size", wanted="several ranks", allowed="1")] if req.tensor_parallel > 1 else []


# --- the start -------------------------------------------------------------------------------------------------------


class StartsWhenMade(Right):
    def __init__(self, context: ExecutorContext) -> None:
        super().__init__(context)
        self.start()

    def start(self) -> None:
        if self._thread is None:
            super().start()


class CountsFromOne(Right):
    @classmethod
    def serve_process(cls, pipe: Connection, make_worker: Maker, rank: int, search_path: Sequence[str]) -> None:
        super().serve_process(pipe, make_worker, rank + 1, search_path)


class MakesItHereToo(Right):
    """Makes rank 0 in the engine's process as well, to look at it."""

    def start(self) -> None:
        self.context.make_worker(0)
        super().start()


class FirstRanksMemory(Right):
    def available_kv_memory(self) -> int:
        return int(self.collective_rpc("available_kv_memory")[0])


class BlocksIn32Bits(Right):
    def initialize_kv_cache(self, num_blocks: int) -> None:
        super().initialize_kv_cache(num_blocks % 2**32)


class FirstRanksSpec(Right):
    def kv_cache_spec(self) -> KVCacheSpec:
        spec: KVCacheSpec = self.collective_rpc("kv_cache_spec")[0]
        return spec


# --- steps -----------------------------------------------------------------------------------------------------------


class LosesPromptScores(Right):
    def sample(self) -> Future[ModelOutput]:
        return mapped(super().sample(), lambda output: replace(output, prompt_logprobs={}))


class TellsTheDriverOnly(Right):
    """Other ranks hear nothing of new requests."""

    @classmethod
    def answer(cls, worker: Any, method: str, args: tuple[Any, ...]) -> Any:
        if method == "execute_model" and worker.rank:
            args = (replace(args[0], new_requests=[]),)
        return super().answer(worker, method, args)


class CompletesInAnyOrder(Right):
    """Some futures are completed from another thread, later."""

    def complete(self, call: Call) -> None:
        calls = self.__dict__.setdefault("calls", [])
        calls.append(call)
        if len(calls) % 3:
            super().complete(call)
        else:
            threading.Timer(0.05, super().complete, [call]).start()


class TakesIdsAsTheyAre(Right):
    """Takes the worker's result without waiting for the ids to reach the host."""

    @classmethod
    def answer(cls, worker: Any, method: str, args: tuple[Any, ...]) -> Any:
        given = cls.method(worker, method)(*args)
        if isinstance(given, Future):
            return given.result() if given.done() else None
        return given


class WaitsForEachStep(Right):
    def execute_model(self, output: SchedulerOutput) -> Future[None]:
        future = super().execute_model(output)
        future.exception()
        return future


class TakesOneStep(Right):
    @property
    def max_concurrent_batches(self) -> int:
        return 1


class EndsWithTheFirstFailure(Right):
    """A worker that has raised takes no more calls."""

    failed = False

    @classmethod
    def packed(cls, error: Exception, rank: int) -> Exception:
        cls.failed = True  # in the worker's process alone
        return super().packed(error, rank)

    @classmethod
    def method(cls, worker: Any, name: str) -> Callable[..., Any]:
        if cls.failed:
            raise ExecutorError("a call failed before")
        return super().method(worker, name)


class KeepsTheFailure(Right):
    """Takes a failed step for a dead worker."""

    def complete(self, call: Call) -> None:
        super().complete(call)
        if isinstance(error := call.future.exception(), ValueError):
            self._dead = ExecutorError(str(error))


# --- exceptions ------------------------------------------------------------------------------------------------------


class LosesTheType(Right):
    @classmethod
    def packed(cls, error: Exception, rank: int) -> Exception:
        return ExecutorError(str(super().packed(error, rank)))


class LosesTheTraceback(Right):
    @classmethod
    def packed(cls, error: Exception, rank: int) -> Exception:
        packed = super().packed(error, rank)
        packed.__notes__ = [f"raised on rank {rank}"]
        return packed


class LosesTheRank(Right):
    @classmethod
    def packed(cls, error: Exception, rank: int) -> Exception:
        packed = super().packed(error, rank)
        packed.__notes__ = [note.replace(f"raised on rank {rank}", "raised") for note in packed.__notes__]
        return packed


class SendsWhatItCannot(Right):
    """Sends any exception, and ends where pickle refuses."""

    @classmethod
    def packed(cls, error: Exception, rank: int) -> Exception:
        found = super().packed(error, rank)
        pickle.loads(pickle.dumps(error))
        return found


# --- calls by name ---------------------------------------------------------------------------------------------------


class AnswersBackwards(Right):
    def collective_rpc(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        return super().collective_rpc(method, *args, timeout_s=timeout_s)[::-1]


class CallsAnything(Right):
    @classmethod
    def method(cls, worker: Any, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(worker, name)
        return function


class CallsThePrivate(Right):
    @classmethod
    def method(cls, worker: Any, name: str) -> Callable[..., Any]:
        if not callable(found := getattr(worker, name, None)):
            raise ExecutorError(f"the worker has no method {name!r}")
        return found  # type: ignore[no-any-return]


class WaitsForEver(Right):
    def collective_rpc(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        return super().collective_rpc(method, *args)


# --- health and death ------------------------------------------------------------------------------------------------


class CriesAtTheEnd(Right):
    """Takes the end of a worker that was asked to end for a death."""

    def shutdown(self) -> None:
        alive = self._thread is not None
        super().shutdown()
        for callback in self._callbacks * alive:
            callback(ExecutorError("rank 0: the worker's process is gone"))


class CriesOverAStep(Right):
    def complete(self, call: Call) -> None:
        super().complete(call)
        if error := call.future.exception():
            for callback in self._callbacks:
                callback(error)


class SwallowsADeath(Right):
    def died(self, rank: int) -> None:
        pass


class TellsTwice(Right):
    def on_failure(self, callback: Callable[[BaseException], None]) -> None:
        super().on_failure(callback)
        super().on_failure(callback)


class StaysHealthy(Right):
    """check_health looks at whether it was started."""

    def check_health(self) -> None:
        if self._thread is None:
            raise ExecutorError("the workers are not running")


class ForgetsWhatWaits(Right):
    """Tells of a death, and leaves the futures to wait."""

    def _die(self, error: ExecutorError, *, tell: bool) -> None:
        if tell:
            for pending in self._pending:
                pending.clear()
        super()._die(error, tell=tell)


class OldSearchPath(Right):
    """Workers look for plugins where the executor's module was imported."""

    at_import = tuple(sys.path)

    def search_path(self) -> Sequence[str]:
        return self.at_import


# --- the end ---------------------------------------------------------------------------------------------------------


class KillsWithoutAWord(Right):
    def _send(self, pipes: Sequence[Connection], method: str | None, args: tuple[Any, ...]) -> None:
        if method is not None:
            super()._send(pipes, method, args)

    def end_processes(self) -> None:
        for process in self._processes:
            process.kill()
        super().end_processes()


class EndsTwice(Right):
    @classmethod
    def serve_process(cls, pipe: Connection, make_worker: Maker, rank: int, search_path: Sequence[str]) -> None:
        made = []

        def make(rank: int) -> Any:
            made.append(make_worker(rank))
            return made[0]

        super().serve_process(pipe, make, rank, search_path)
        if made:
            made[0].shutdown()


class DropsWhatIsInFlight(Right):
    """Ends at once where steps are in flight, and forgets their futures."""

    def shutdown(self) -> None:
        if self._dead is None and any(self._pending):
            for process in self._processes:
                process.kill()
            for pending in self._pending:
                pending.clear()
        super().shutdown()


class RaisesAnything(Right):
    def _require(self) -> None:
        if self._thread is None and self._dead is None:
            raise AttributeError("'NoneType' object has no attribute 'send'")
        super()._require()


class HealthyAfterTheEnd(Right):
    def check_health(self) -> None:
        if self._thread is not None or self._dead is None:
            super().check_health()


class LeavesAPipe(Right):
    def shutdown(self) -> None:
        if self._thread is not None:
            os.dup(self._bell.fileno())
        super().shutdown()


class LeavesSharedMemory(Right):
    def shutdown(self) -> None:
        if self._thread is not None:
            SharedMemory(create=True, size=4096).close()
        super().shutdown()


class LeavesAThread(Right):
    def shutdown(self) -> None:
        if self._thread is not None:
            threading.Thread(target=threading.Event().wait, args=[60], daemon=True).start()
        super().shutdown()


class EndsOnlyWhatHasStarted(Right):
    started = False

    def start(self) -> None:
        super().start()
        self.started = True

    def shutdown(self) -> None:
        if self.started:
            super().shutdown()


class SharesItsProcesses(Right):
    """Keeps the processes of all executors in one list."""

    everyone: list[Any] = []  # noqa: RUF012 - that it is shared is the fault

    def __init__(self, context: ExecutorContext) -> None:
        super().__init__(context)
        self._own = self._processes

    def start(self) -> None:
        super().start()
        self.everyone.extend(self._own)

    def end_processes(self) -> None:
        for process in self.everyone:
            if process not in self._own:
                process.kill()
        super().end_processes()
        self.everyone.clear()


ORDER = "results_come_in_the_order_of_calls"
RAISES = "a_workers_exception_reaches_the_caller"
DEATH = "a_death_is_told_once"
LEFT = "nothing_is_left_behind"
MUTANTS = [
    Mutant(
        "no_executor",
        "the factory returns a function",
        "factory_gives_an_executor",
        replace(RECORD, factory=_no_executor),
    ),
    Mutant(
        "demands_one_rank",
        "its check refuses ranks that its fields declare",
        "what_is_declared_is_accepted",
        replace(RECORD, check=_wants_one_rank),
    ),
    Mutant(
        "accepts_everything",
        "its record answers yes to every demand",
        "what_is_not_declared_is_refused",
        accepts_everything(RECORD),
    ),
    *(
        Mutant(name, fault, law, replace(RECORD, factory=broken))
        for name, fault, law, broken in (
            ("starts_when_made", "workers are made before start", "factory_gives_an_executor", StartsWhenMade),
            ("counts_from_one", "the first rank is 1", "every_rank_has_one_worker", CountsFromOne),
            ("makes_it_here_too", "rank 0 is made in two processes", "every_rank_has_one_worker", MakesItHereToo),
            (
                "first_ranks_memory",
                "the first rank's memory stands for all",
                "cache_calls_pass_unchanged",
                FirstRanksMemory,
            ),
            (
                "blocks_in_32_bits",
                "the number of blocks is cut to 32 bits",
                "cache_calls_pass_unchanged",
                BlocksIn32Bits,
            ),
            (
                "first_ranks_spec",
                "the first rank's spec stands for all",
                "workers_that_disagree_are_refused",
                FirstRanksSpec,
            ),
            (
                "loses_prompt_scores",
                "the prompt's scores are dropped",
                "steps_and_results_pass_unchanged",
                LosesPromptScores,
            ),
            (
                "tells_the_driver_only",
                "other ranks hear of no new request",
                "steps_and_results_pass_unchanged",
                TellsTheDriverOnly,
            ),
            ("completes_in_any_order", "a future is done before an earlier one", ORDER, CompletesInAnyOrder),
            ("takes_ids_as_they_are", "ids that are still on their way are lost", ORDER, TakesIdsAsTheyAre),
            (
                "waits_for_each_step",
                "a call returns when its step has run",
                "calls_return_while_a_step_runs",
                WaitsForEachStep,
            ),
            (
                "takes_one_step",
                "it declares two steps in flight and takes one",
                "calls_return_while_a_step_runs",
                TakesOneStep,
            ),
            (
                "ends_with_the_first_failure",
                "a worker takes no call after a failed one",
                "a_failed_step_holds_up_nothing",
                EndsWithTheFirstFailure,
            ),
            (
                "keeps_the_failure",
                "a failed step is taken for a dead worker",
                "a_failed_step_holds_up_nothing",
                KeepsTheFailure,
            ),
            ("loses_the_type", "every exception becomes an ExecutorError", RAISES, LosesTheType),
            ("loses_the_traceback", "an exception comes without the worker's traceback", RAISES, LosesTheTraceback),
            ("loses_the_rank", "an exception does not say whose it is", RAISES, LosesTheRank),
            (
                "sends_what_it_cannot",
                "a worker dies of an exception that pickle refuses",
                "an_exception_that_cannot_be_sent_is_quoted",
                SendsWhatItCannot,
            ),
            (
                "answers_backwards",
                "answers come from the last rank to the first",
                "rpc_reaches_every_rank",
                AnswersBackwards,
            ),
            ("calls_anything", "an unknown method is an AttributeError", "rpc_of_no_method_is_refused", CallsAnything),
            ("calls_the_private", "private methods may be called", "rpc_of_no_method_is_refused", CallsThePrivate),
            ("waits_for_ever", "a timeout is accepted and ignored", "rpc_keeps_its_timeout", WaitsForEver),
            ("cries_at_the_end", "shutdown is told as a death", "there_is_no_false_alarm", CriesAtTheEnd),
            ("cries_over_a_step", "a failed step is told as a death", "there_is_no_false_alarm", CriesOverAStep),
            ("swallows_a_death", "nobody hears that a worker died", DEATH, SwallowsADeath),
            ("tells_twice", "a death is told twice", DEATH, TellsTwice),
            ("stays_healthy", "check_health does not see a death", DEATH, StaysHealthy),
            (
                "forgets_what_waits",
                "futures of a dead worker wait for ever",
                "a_death_ends_what_waits",
                ForgetsWhatWaits,
            ),
            (
                "old_search_path",
                "workers do not get the engine's sys.path",
                "workers_find_the_engines_plugins",
                OldSearchPath,
            ),
            (
                "kills_without_a_word",
                "workers are killed, not shut down",
                "shutdown_ends_every_worker",
                KillsWithoutAWord,
            ),
            ("ends_twice", "a worker is shut down twice", "shutdown_ends_every_worker", EndsTwice),
            (
                "drops_what_is_in_flight",
                "futures wait for ever after shutdown",
                "shutdown_ends_what_waits",
                DropsWhatIsInFlight,
            ),
            (
                "raises_anything",
                "a call before start is an AttributeError",
                "use_out_of_time_is_refused",
                RaisesAnything,
            ),
            (
                "healthy_after_the_end",
                "check_health is content after shutdown",
                "use_out_of_time_is_refused",
                HealthyAfterTheEnd,
            ),
            ("leaves_a_pipe", "a pipe stays open", LEFT, LeavesAPipe),
            ("leaves_shared_memory", "shared memory is not unlinked", LEFT, LeavesSharedMemory),
            ("leaves_a_thread", "a thread goes on", LEFT, LeavesAThread),
            (
                "ends_only_what_has_started",
                "after a failed start shutdown does nothing",
                "a_failed_start_leaves_nothing",
                EndsOnlyWhatHasStarted,
            ),
            (
                "shares_its_processes",
                "one executor's end takes another's workers",
                "two_executors_keep_apart",
                SharesItsProcesses,
            ),
        )
    ),
]
