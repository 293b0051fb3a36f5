"""Lives: what happens to a scheduler from its start to idleness, drawn from a fixed seed.

Three kinds of them. *Any*: small sizes of every kind, aborts, and pauses. *Pressed*: requests that want several times the pool,
so that some are sent back. *Shared*: prompts that begin alike, over a prefix cache that is too small for them. A life is data:
its text says how to repeat it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from enginebay.conformance.scheduler.answers import VOCABULARY
from enginebay.conformance.scheduler.arrangement import Arrangement, Load
from enginebay.conformance.scheduler.simulator import Simulator

What = Literal["add", "step", "retire", "run", "abort"]
_ANY: tuple[What, ...] = ("add", "add", "add", "step", "step", "retire", "run", "run", "abort")


@dataclass(frozen=True)
class Action:
    """Something that happens: `load` is offered, the request of that `number` aborted, or that many steps run."""

    what: What
    number: int = 0
    load: Load | None = None

    def __str__(self) -> str:
        return f"add {self.load}" if self.load else f"{self.what} {self.number}"


@dataclass(frozen=True)
class Life:
    """An engine's sizes and what happens to it. At the end it runs until it is idle."""

    arrangement: Arrangement
    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return "\n  ".join([str(self.arrangement), *map(str, self.actions)])

    def live(self, sim: Simulator) -> None:
        """Let it happen."""
        for action in self.actions:
            if action.load is not None:
                sim.offer(action.load)
            elif action.what == "step":
                sim.step()
            elif action.what == "retire" and sim.flying:
                sim.retire()
            elif action.what == "run":
                sim.run(steps=action.number)
            elif action.what == "abort":
                names = list(sim.received)
                sim.abort(names[action.number % len(names)] if names else "nobody", "nobody")
        sim.run()
        sim.check_idle()


def lives(seed: int, number: int, *, priorities: bool, concurrent: int, large: bool) -> Iterator[Life]:
    """`number` lives, small ones first: of eight six are of any kind, one is pressed, one shares prompts.

    Parameters
    ----------
    priorities
        Whether requests may have one.
    concurrent
        Most steps in flight.
    large
        Sizes nearer to those met in use.
    """
    for i in range(number):
        draw = random.Random(f"{seed} {i}")
        kind = (_any, _any, _any, _pressed, _any, _any, _any, _shared)[i % 8]
        life = kind(draw, 1 + 3 * large)
        life = replace(life, arrangement=replace(life.arrangement, concurrent=draw.randint(1, concurrent)))
        yield life if priorities else _without_priorities(life)


def _any(draw: random.Random, scale: int) -> Life:
    arrangement = Arrangement(
        windows=tuple(draw.choice((None, None, draw.randint(1, 9))) for _ in range(draw.choice((1, 1, 2)))),
        prefix_caching=draw.random() < 0.5,
        block_size=draw.randint(1, 4),
        usable_blocks=draw.randint(4, 30 * scale),
        max_num_seqs=draw.randint(1, 4 * scale),
        budget=draw.randint(1, 12 * scale),
        max_model_len=draw.randint(16, 40 * scale),
        chunked_prefill=draw.random() < 0.7,
        max_prefill_tokens=draw.choice((None, None, draw.randint(1, 8))),
    )
    actions = []
    for _ in range(draw.randint(3, 24)):
        what = draw.choice(_ANY)
        load = _load(draw, draw.randint(1, 14 * scale), draw.randint(1, 20 * scale)) if what == "add" else None
        actions.append(Action(what, draw.randint(1, 8), load))
    return Life(arrangement, tuple(actions))


def _pressed(draw: random.Random, scale: int) -> Life:
    """Requests whose outputs nobody could foresee to fill the pool: each is several times as long as its prompt."""
    block_size, outputs = draw.randint(1, 4), draw.randint(40, 70)
    prompt = draw.randint(1, 12)
    arrangement = Arrangement(
        windows=(None,),
        prefix_caching=draw.random() < 0.3,
        block_size=block_size,
        usable_blocks=-(-(prompt + outputs) * draw.choice((3, 4, 5)) // (2 * block_size)),
        max_num_seqs=draw.randint(3, 4) * scale,
        budget=draw.randint(4, 24),
        max_model_len=prompt + outputs + 8,
        max_prefill_tokens=draw.choice((None, 1, 2)),
    )
    loads = [_load(draw, prompt, outputs) for _ in range(draw.randint(3, 5) * scale)]
    if draw.random() < 0.5:  # all alike: then who came first counts
        loads = [replace(loads[0], stops=())] * len(loads)
    actions = [Action("add", load=load) for load in loads]
    for _ in range(4):
        actions.insert(draw.randint(1, len(actions)), Action("run", draw.randint(1, 30)))
    if draw.random() < 0.5:
        actions += [Action("run", draw.randint(20, 60)), Action("abort", draw.randint(0, 4))]
    return Life(arrangement, tuple(actions))


def _shared(draw: random.Random, scale: int) -> Life:
    length = 12 * scale
    stems = [[draw.randrange(VOCABULARY) for _ in range(length)] for _ in range(2)]
    arrangement = Arrangement(
        windows=draw.choice(((None,), (None,), (None, 6))),
        prefix_caching=True,
        block_size=draw.choice((2, 4)),
        usable_blocks=draw.randint(16, 30) * scale,
        max_num_seqs=draw.randint(2, 4),
        budget=draw.randint(6, 16),
        max_model_len=3 * length,
    )
    actions = []
    for _ in range(draw.randint(4, 10)):
        stem = draw.choice(stems)[: draw.randint(length // 2, length)]
        load = _load(draw, draw.randint(1, 3), draw.randint(1, length // 2))
        actions.append(Action("add", load=replace(load, prompt=(*stem, *load.prompt), stops=())))
        if draw.random() < 0.6:
            actions.append(Action("run", draw.randint(1, 12)))
        if draw.random() < 0.1:
            actions.append(Action("abort", draw.randint(0, 9)))
    return Life(arrangement, tuple(actions))


def _load(draw: random.Random, prompt: int, outputs: int) -> Load:
    tokens = tuple(draw.randrange(VOCABULARY) for _ in range(prompt))
    stops = (draw.randrange(VOCABULARY),) if draw.random() < 0.15 else ()
    return Load(tokens, outputs, stops, draw.choice((0, 0, 1, 2)), draw.choice(("", "", "", "x")))


def _without_priorities(life: Life) -> Life:
    plain = (replace(a, load=replace(a.load, priority=0)) if a.load else a for a in life.actions)
    return replace(life, actions=tuple(plain))
