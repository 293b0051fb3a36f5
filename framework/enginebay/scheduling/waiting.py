"""The queue of requests that wait for a seat, in the policy's order.

It knows keys and requests. It does not know seats, blocks or budgets, and never asks the policy again.
"""

from __future__ import annotations

import heapq

from enginebay.interfaces.scheduler import Request

#: The policy's key, then arrival, then the order of `add`: no two requests have the same.
AdmissionKey = tuple[tuple[float, ...], int, int]

#: Entries of discarded requests that may lie in the heap before it is rebuilt, beyond the number of live ones.
_SLACK = 64


class WaitingQueue:
    """A heap by admission key. A discarded request leaves at once; its heap entry goes later."""

    def __init__(self) -> None:
        self._heap: list[tuple[AdmissionKey, Request]] = []
        self._members: set[Request] = set()

    def __len__(self) -> int:
        return len(self._members)

    def push(self, key: AdmissionKey, request: Request) -> None:
        """Queue `request`, which is not in the queue."""
        heapq.heappush(self._heap, (key, request))
        self._members.add(request)

    def peek(self) -> Request | None:
        """The request with the smallest key, or None."""
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def discard(self, request: Request) -> None:
        """Take `request` out wherever it stands; nothing happens if it is not queued."""
        self._members.discard(request)
        if len(self._heap) > 2 * len(self._members) + _SLACK:
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapq.heapify(self._heap)
