"""Urgent first. It knows priorities and arrivals, and nothing else of requests."""

from __future__ import annotations

from collections.abc import Sequence

from enginebay.interfaces.scheduler import Request, SchedulingPolicy


class UrgentFirst(SchedulingPolicy):
    """The smallest `Request.priority` is served first, equal ones as they arrived.

    A waiting request takes the seat, or the blocks, of a running one that is less urgent; equals never displace each
    other. A request keeps its arrival through preemptions, so that it does not lose its seniority among equals.
    """

    uses_priority = True

    def admission_key(self, request: Request) -> tuple[float, ...]:
        """By urgency, then by arrival."""
        return (request.priority, request.arrival)

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """The least urgent, and of those the latest arrival."""
        return max(running, key=lambda request: (request.priority, request.arrival))

    def may_preempt(self, waiting: Request, victim: Request) -> bool:
        """Only for somebody less urgent."""
        return waiting.priority < victim.priority
