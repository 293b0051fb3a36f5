"""Shortest job first, without starvation. It orders requests; it knows nothing of blocks, chunks or the model."""

from __future__ import annotations

from collections.abc import Sequence

from enginebay.interfaces.scheduler import Request, SchedulingPolicy


class ShortestJobFirst(SchedulingPolicy):
    """A job's length is its prompt's and the most that it may produce, and a little more for each job that came before.

    A key must not change while its request waits, so nobody ages; newcomers are held back instead. A job of `n` tokens waits
    for at most ``n / tokens_per_arrival`` of those that arrive after it.
    """

    def __init__(self, tokens_per_arrival: float) -> None:
        self.tokens_per_arrival = tokens_per_arrival

    def admission_key(self, request: Request) -> tuple[float, ...]:
        """The smallest waiting key is served next; equal ones as they arrived."""
        length = request.num_prompt_tokens + request.max_output_tokens
        return (length + self.tokens_per_arrival * request.arrival, request.arrival)

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """When blocks are short, the longest job gives its own back, and waits again."""
        return max(running, key=self.admission_key)
