"""The conformance suite's simulator, with the built-in mechanics in it and all checks on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from enginebay.conformance.scheduler import answers
from enginebay.conformance.scheduler import simulator as kit
from enginebay.conformance.scheduler.arrangement import Arrangement, Load
from enginebay.interfaces.scheduler import FinishReason, Request, SchedulingPolicy
from enginebay.scheduling.scheduler import TokenBudgetScheduler


class Fcfs(SchedulingPolicy):
    """The plainest policy: every default, ordered by arrival."""

    def admission_key(self, request: Request) -> tuple[float, ...]:
        return (request.arrival,)


class Simulator(kit.Simulator):
    """The built-in scheduler, run on the made-up device."""

    scheduler: TokenBudgetScheduler

    def __init__(
        self,
        *,
        policy: SchedulingPolicy | None = None,
        groups: int = 1,
        windows: Sequence[int | None] | None = None,
        **sizes: Any,
    ) -> None:
        chosen = policy or Fcfs()
        arrangement = Arrangement(windows=tuple(windows or [None] * groups), **sizes)
        super().__init__(lambda context: (TokenBudgetScheduler(replace(context, policy=chosen)), chosen), arrangement)

    def request(
        self,
        prompt: Iterable[int],
        outputs: int,
        stops: Iterable[int] = (),
        priority: int = 0,
        name: str = "",
        salt: str = "",
    ) -> Request:
        return self.make(Load(tuple(prompt), outputs, tuple(stops), priority, salt), name)

    def add(
        self,
        prompt: Iterable[int],
        outputs: int,
        stops: Iterable[int] = (),
        priority: int = 0,
        name: str = "",
        salt: str = "",
    ) -> Request:
        return self.queue(Load(tuple(prompt), outputs, tuple(stops), priority, salt), name)

    @staticmethod
    def reference(request: Request) -> tuple[list[int], FinishReason]:
        return answers.reference(request)


@pytest.fixture(scope="session")
def simulator() -> type[Simulator]:
    """The class `Simulator`; of session scope, so that hypothesis may use it."""
    return Simulator
