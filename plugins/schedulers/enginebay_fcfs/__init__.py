"""First come, first served: the record of the default scheduling policy. The ordering itself is in `policy`."""

from __future__ import annotations

from enginebay import hookimpl
from enginebay.interfaces.scheduler import SchedulerContext, SchedulingPolicy
from enginebay.plugins.records import SchedulerRecord


def make(context: SchedulerContext) -> SchedulingPolicy:
    """Build the policy."""
    from enginebay_fcfs.policy import FirstComeFirstServed

    return FirstComeFirstServed()


@hookimpl
def enginebay_schedulers() -> list[SchedulerRecord]:
    """The one policy of this plugin."""
    return [SchedulerRecord(name="fcfs", summary="first come, first served", factory=make, api_version=0)]
