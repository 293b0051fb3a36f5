"""A plugin put to work in a simulation: a policy steers the built-in mechanics, a whole scheduler runs in their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pydantic import BaseModel

from enginebay.conformance.scheduler.arrangement import Arrangement, Load
from enginebay.conformance.scheduler.simulator import Simulator
from enginebay.conformance.scheduler.watch import Watch
from enginebay.errors import RequestError
from enginebay.interfaces.scheduler import Scheduler, SchedulerContext, SchedulingPolicy
from enginebay.plugins.making import made_by
from enginebay.plugins.records import SchedulerRecord
from enginebay.scheduling.scheduler import TokenBudgetScheduler

_OTHERWISE = "mend the plugin"


def make_policy(record: SchedulerRecord, context: SchedulerContext) -> SchedulingPolicy:
    """The policy that the record's factory builds."""
    where = f"scheduler:{record.name}"
    return made_by(record, context, SchedulingPolicy, where, _OTHERWISE)  # type: ignore[type-abstract]


def make_scheduler(record: SchedulerRecord, context: SchedulerContext) -> Scheduler:
    """The scheduler that the record's factory builds."""
    where = f"scheduler:{record.name}"
    return made_by(record, context, Scheduler, where, _OTHERWISE)  # type: ignore[type-abstract]


def simulate(
    record: SchedulerRecord,
    arrangement: Arrangement,
    watch: Watch | None = None,
    *,
    options: BaseModel | None = None,
    name: Callable[[int], str] = "r{}".format,
) -> Simulator:
    """The plugin at work; by default everything is watched."""

    def build(context: SchedulerContext) -> tuple[Scheduler, SchedulingPolicy | None]:
        if record.depth == "scheduler":
            return make_scheduler(record, context), None
        policy = make_policy(record, context)
        return TokenBudgetScheduler(replace(context, policy=policy)), policy

    chosen = record.options() if options is None else options
    return Simulator(build, arrangement, watch, options=chosen, name=name)


def takes_priority(record: SchedulerRecord) -> bool:
    """Whether requests may have a priority: a plugin that would ignore it refuses them."""
    try:
        simulate(record, Arrangement()).queue(Load((1, 2, 3), 2, priority=1))
    except RequestError:
        return False
    return True
