"""The waiting queue."""

from __future__ import annotations

import numpy as np
from enginebay.interfaces.scheduler import Request
from enginebay.sampling.params import SamplingParams
from enginebay.scheduling.waiting import WaitingQueue


def request(name: str) -> Request:
    return Request(name, np.zeros(1, np.int32), SamplingParams(), frozenset(), 1, seed=0)


def drain(queue: WaitingQueue) -> list[str]:
    names = []
    while (first := queue.peek()) is not None:
        names.append(first.request_id)
        queue.discard(first)
    return names


def test_smallest_key_first_whatever_the_order_of_arrival() -> None:
    queue = WaitingQueue()
    for name, key in (("c", 2.0), ("a", 1.0), ("b", 1.0)):
        queue.push(((key,), 0, ord(name)), request(name))
    assert len(queue) == 3
    assert drain(queue) == ["a", "b", "c"]
    assert queue.peek() is None


def test_a_discarded_request_is_gone_and_may_come_back() -> None:
    queue, a, b = WaitingQueue(), request("a"), request("b")
    queue.push(((1.0,), 0, 0), a)
    queue.push(((2.0,), 0, 1), b)
    queue.discard(b)
    queue.discard(b)
    queue.discard(a)
    assert len(queue) == 0
    assert queue.peek() is None
    queue.push(((1.0,), 0, 0), a)
    assert drain(queue) == ["a"]


def test_many_discarded_requests_do_not_pile_up() -> None:
    queue, last = WaitingQueue(), request("last")
    queue.push(((0.0,), 0, 0), request("first"))
    for i in range(1000):
        gone = request(str(i))
        queue.push(((1.0,), 0, i + 1), gone)
        queue.discard(gone)
    queue.push(((2.0,), 0, 2000), last)
    assert len(queue._heap) < 100
    assert drain(queue) == ["first", "last"]
