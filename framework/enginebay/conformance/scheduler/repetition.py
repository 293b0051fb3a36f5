"""A life lived twice: under other ids, with requests at other addresses and by another clock, it must be the same life."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from enginebay.conformance.scheduler.lives import Life
from enginebay.conformance.scheduler.purity import leaping_clock, scatter_addresses
from enginebay.conformance.scheduler.trial import simulate
from enginebay.plugins.records import SchedulerRecord

#: a step: numbers of its requests, tokens, slots, and blocks
Trace = list[tuple[list[int], list[int], list[int], list[list[int]]]]


def same_again(record: SchedulerRecord, life: Life) -> str:
    """Where the second life differs from the first; nothing if it does not."""
    first = _trace(record, life, "r{}".format)
    scatter_addresses(len(life.actions))
    with leaping_clock():
        second = _trace(record, life, _other_name)
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return f"step {number} has requests, tokens, slots, blocks {one}, and the second time {other}"
    return "" if len(first) == len(second) else f"{len(first)} steps, and the second time {len(second)}"


def _other_name(number: int) -> str:
    """Ids that sort and hash otherwise."""
    return f"{(number * 7919 + 13) % 101:03}-{number}"


def _trace(record: SchedulerRecord, life: Life, name: Callable[[int], str]) -> Trace:
    sim = simulate(record, life.arrangement, name=name)
    with contextlib.suppress(Exception):  # a broken life must break twice in one place; that it breaks is another law's
        life.live(sim)
    numbers = {request_id: number for number, request_id in enumerate(sim.received)}
    return [
        (
            [numbers[request_id] for request_id in names],
            step.num_scheduled_tokens.tolist(),
            step.slots.tolist(),
            [blocks.block_ids.tolist() for blocks in step.new_blocks],
        )
        for names, step in zip(sim.history, sim.outputs, strict=True)
    ]
