"""Siblings: completions of one prompt, which share its blocks.

The first of them, the leader, computes the prompt; the others are held back until it has, and then find its blocks in the
prefix cache. It knows requests and who leads them; it does not know queues, blocks or steps.
"""

from __future__ import annotations

from collections.abc import Container

from enginebay.interfaces.scheduler import Request


class Siblings:
    """Requests that wait for their leader's prompt."""

    def __init__(self) -> None:
        self._held: dict[Request, list[Request]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def hold(self, request: Request, unfinished: Container[str]) -> bool:
        """Keep `request` back if its leader is among the `unfinished` ids and has produced nothing yet."""
        leader = request.leader
        if leader is None or leader.request_id not in unfinished or leader.output_token_ids:
            return False
        self._held.setdefault(leader, []).append(request)
        return True

    def release(self, leader: Request) -> list[Request]:
        """Let those go that wait for `leader`, in order of arrival: its prompt is computed, or it has ended."""
        return self._held.pop(leader, [])

    def discard(self, request: Request) -> None:
        """Forget a held request that has ended; nothing happens if it is not held."""
        if request.leader in self._held and request in (held := self._held[request.leader]):
            held.remove(request)
