"""First come, first served. It knows when requests arrived and nothing else of them."""

from __future__ import annotations

from collections.abc import Sequence

from enginebay.interfaces.scheduler import Request, SchedulingPolicy


class FirstComeFirstServed(SchedulingPolicy):
    """Requests are admitted as they arrived; the latest arrival gives way when blocks are short.

    Nobody gives way to a waiting request, and prompts may take all that decode rows leave of a step.
    """

    def admission_key(self, request: Request) -> tuple[float, ...]:
        """By arrival."""
        return (request.arrival,)

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """The latest arrival: it has the least work to lose and the weakest claim."""
        return max(running, key=lambda request: request.arrival)
