"""Priorities: the record of the policy that serves urgent requests first. The ordering itself is in `policy`."""

from __future__ import annotations

from enginebay import hookimpl
from enginebay.interfaces.scheduler import SchedulerContext, SchedulingPolicy
from enginebay.plugins.records import SchedulerRecord


def make(context: SchedulerContext) -> SchedulingPolicy:
    """Build the policy."""
    from enginebay_priority.policy import UrgentFirst

    return UrgentFirst()


@hookimpl
def enginebay_schedulers() -> list[SchedulerRecord]:
    """The one policy of this plugin."""
    return [
        SchedulerRecord(
            name="priority",
            summary="urgent requests first, and in the place of less urgent running ones",
            factory=make,
            api_version=0,
            # Behind fcfs: auto must not change the order of those who give no priorities.
            priority=-1,
        )
    ]
