"""What a policy is asked, and what it may not do with it: requests of many kinds, their snapshots, and a clock that leaps.

It calls no mechanics.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np

from enginebay.interfaces.scheduler import Request, RequestStatus, SchedulingPolicy
from enginebay.sampling.params import SamplingParams


def sample(number: int = 12) -> list[Request]:
    """Running requests of several lengths, priorities and states of progress, in order of admission."""
    requests = []
    for i in range(number):
        prompt = np.arange((4, 1, 30)[i % 3], dtype=np.int32)
        request = Request(f"{i * 37 % 101}-{i}", prompt, SamplingParams(max_tokens=40), frozenset(), 40, seed=i)
        request.arrival, request.priority = i, (0, 3, 0, -1)[i // 2 % 4]
        request.output_token_ids = [1] * (0, 5, 0, 39, 1)[i % 5]
        request.slot, request.status, request.first_scheduled = i, RequestStatus.RUNNING, float(i)
        requests.append(request)
    return requests


def snapshot(requests: Sequence[Request]) -> list[dict[str, Any]]:
    """All fields of each request, copied."""
    return [
        {field.name: copy.copy(getattr(request, field.name)) for field in dataclasses.fields(request)}
        for request in requests
    ]


def changes(requests: Sequence[Request], before: Sequence[dict[str, Any]]) -> str:
    """Which fields are not as they were in a `snapshot`."""
    return "; ".join(
        f"request {request.request_id}: {name} was {value!r} and is {getattr(request, name)!r}"
        for request, fields in zip(requests, before, strict=True)
        for name, value in fields.items()
        if not np.array_equal(value, getattr(request, name))
    )


def key_fault(key: object) -> str:
    """What is wrong with an admission key; nothing if it is a tuple of finite numbers."""
    if not isinstance(key, tuple) or not key:
        return f"{key!r} is no tuple of numbers"
    if not all(isinstance(part, int | float) and math.isfinite(part) for part in key):
        return f"{key!r} holds something that is no finite number"
    return ""


@contextlib.contextmanager
def leaping_clock() -> Iterator[None]:
    """Every look at the clock finds it hours later, or earlier."""
    ticks = itertools.cycle((1e6, 3.0, 7e6, 2e5))
    names = ("time", "monotonic", "perf_counter", "process_time")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(time, name, side_effect=ticks))
            stack.enter_context(mock.patch.object(time, f"{name}_ns", side_effect=map(int, ticks)))
        yield


def scatter_addresses(seed: int) -> None:
    """Leave holes in the memory that requests come from, so that their addresses have another order from now on."""
    draw, kept = random.Random(seed), sample(200)
    draw.shuffle(kept)
    while kept:
        kept.pop()


def assert_pure(
    answers: list[Any],
    ask: Callable[[SchedulingPolicy], list[Any]],
    policy: SchedulingPolicy,
    other: SchedulingPolicy,
    what: str,
) -> None:
    """The same answers when asked again, by another policy that was asked otherwise, and at other times."""
    assert ask(policy) == answers, f"{what} answers otherwise when asked again"
    assert ask(other) == answers, f"{what} of another policy of the same record answers otherwise"
    with leaping_clock():
        assert ask(policy) == answers, f"{what} looks at the clock"


def in_any_order(questions: list[Any], ask: Callable[[Any], Any]) -> list[Any]:
    """Answers in the order of the questions, asked in another one, some of them twice."""
    order = [*range(len(questions)), *range(0, len(questions), 2)]
    random.Random(len(order)).shuffle(order)
    answers = {i: ask(questions[i]) for i in order}
    return [answers[i] for i in range(len(questions))]
