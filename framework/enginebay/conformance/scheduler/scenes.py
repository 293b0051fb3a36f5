"""Scenes: a scheduler brought into a state that a law is about, through its own interface.

Whether a scheduler gets there is its own affair (one that never preempts has no preempted requests): a scene then gives None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from enginebay.conformance.scheduler.answers import next_token
from enginebay.conformance.scheduler.arrangement import Arrangement, Load
from enginebay.conformance.scheduler.simulator import Simulator
from enginebay.interfaces.scheduler import Request, RequestStatus

Simulate = Callable[[Arrangement], Simulator]
State = Literal["waiting", "mid-prompt", "decoding", "in flight", "preempted", "finished"]
STATES: tuple[State, ...] = ("waiting", "mid-prompt", "decoding", "in flight", "preempted", "finished")

#: two thirds of what three requests of `LONG` want
PRESSED = Arrangement(usable_blocks=32, budget=32)
LONG = Load((1, 2, 3, 4), 56)


def in_state(simulate: Simulate, state: State, concurrent: int) -> tuple[Simulator, Request] | None:
    """A simulation in which a request is in `state`, beside others."""
    if state == "preempted":
        sim = pressed(simulate, concurrent)
        victim = to_preemption(sim)
        return None if victim is None else (sim, victim)
    sim = simulate(Arrangement(budget=6, max_num_seqs=2, concurrent=concurrent))
    sim.offer(Load((1, 2, 3), 20))
    found = sim.offer(Load(tuple(range(13)) * 2, 3 if state == "finished" else 20))
    sim.offer(Load((4, 5, 6), 20))
    if state == "waiting":
        found = sim.received["r2"].request
    for _ in range(300):
        if found is None or (found.finish_reason is not None and state != "finished"):
            return None
        if state == "in flight" and not sim.flying:
            sim.step()
        if _is(sim, found, state):
            return sim, found
        sim.run(steps=1)
    return None


def _is(sim: Simulator, request: Request, state: State) -> bool:
    seat = sim.device.seats.get(request.slot)
    named = any(request.request_id in step.named for step in sim.flying)
    if state in ("waiting", "finished"):
        return request.status.value == state
    if request.status is not RequestStatus.RUNNING or seat is None:
        return False
    chunk = seat.computed < seat.num_prefill
    if state == "mid-prompt":
        return chunk
    return not chunk and (named if state == "in flight" else bool(request.output_token_ids))


def pressed(simulate: Simulate, concurrent: int) -> Simulator:
    """Three equal requests that fill the pool two thirds through."""
    sim = simulate(replace(PRESSED, concurrent=concurrent))
    for _ in range(3):
        sim.offer(LONG)
    return sim


def pressed_mid_prompt(simulate: Simulate, concurrent: int) -> Simulator:
    """Two requests outgrow the pool while a third one's long prompt runs, one token a step."""
    sizes = Arrangement(usable_blocks=40, budget=3, max_model_len=80, max_prefill_tokens=1, concurrent=concurrent)
    sim = simulate(sizes)
    for _ in range(2):
        sim.offer(Load((1, 2, 3, 4), 64))
    sim.run(steps=16)
    sim.offer(Load(tuple(i % 13 for i in range(50)), 2))
    return sim


def to_preemption(sim: Simulator) -> Request | None:
    """Run until a request has been sent back, what is in flight left there; None if none was until all ended."""
    while sim.scheduler.has_unfinished():
        sim.run(steps=1)
        for got in sim.received.values():
            if got.request.num_preemptions and got.finish_reason is None:
                return got.request
    return None


def ends_at(prompt: tuple[int, ...], outputs: int) -> Load:
    """A load that a stop token ends after `outputs` outputs, though it may have more."""
    tokens = list(prompt)
    for _ in range(outputs):
        tokens.append(next_token(tokens))
    return Load(prompt, outputs + 20, (tokens[-1],))
