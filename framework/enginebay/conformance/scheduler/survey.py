"""A plugin led through many lives once: what goes wrong in them, by topic.

Each law asks for its own topic. What is found is made small before it is shown: actions are taken out, and sizes made plain,
as long as the same topic is broken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from enginebay.conformance.scheduler.lives import Life, lives
from enginebay.conformance.scheduler.trial import simulate, takes_priority
from enginebay.conformance.scheduler.watch import Topic, Violation, Watch
from enginebay.conformance.suite import Level
from enginebay.plugins.records import SchedulerRecord

#: lives of each level
NUMBER: dict[Level, int] = {"core": 320, "full": 3200}
#: broken lives after which the rest would tell nothing new
ENOUGH = 40
_SEED = 20
#: tries to make a broken life smaller
_TRIES = 300


@dataclass(frozen=True)
class Fault:
    """What went wrong, and in which life."""

    life: Life
    text: str

    def __str__(self) -> str:
        return f"{self.text}\nin the life\n  {self.life}"


def survey(record: SchedulerRecord, level: Level) -> dict[Topic, Fault]:
    """The first fault of each topic, as it was found."""
    found: dict[Topic, Fault] = {}
    broken = 0
    for life in lives(
        _SEED,
        NUMBER[level],
        priorities=takes_priority(record),
        concurrent=3 if record.async_scheduling else 1,
        large=level == "full",
    ):
        faults = lived(record, life)
        for topic, text in faults.items():
            found.setdefault(topic, Fault(life, text))
        broken += bool(faults)
        if broken >= ENOUGH:
            break
    return found


def lived(record: SchedulerRecord, life: Life) -> dict[Topic, str]:
    """What goes wrong in `life`, the first of each topic; it goes on as far as it can."""
    found: dict[Topic, str] = {}
    try:
        life.live(simulate(record, life.arrangement, Watch(notes=found)))
    except Violation as violation:
        found[violation.topic] = str(violation)
    except Exception as error:  # a plugin may raise anything
        found["liveness"] = f"{type(error).__name__}: {error}"
    return found


def smaller(record: SchedulerRecord, topic: Topic, fault: Fault) -> Fault:
    """A smaller life that breaks the same, where one is found."""
    tries, again = 0, True
    while again and tries < _TRIES:
        again = False
        for life in _cuts(fault.life):
            tries += 1
            text = lived(record, life).get(topic)
            if text is not None:
                fault, again = Fault(life, text), True
                break
            if tries >= _TRIES:
                break
    return fault


def _cuts(life: Life) -> Iterator[Life]:
    """Lives that are a little simpler."""
    size = len(life.actions) // 2
    while size:
        for start in range(0, len(life.actions), size):
            yield replace(life, actions=life.actions[:start] + life.actions[start + size :])
        size //= 2
    for plain in ({"concurrent": 1}, {"prefix_caching": False}, {"windows": (None,)}, {"max_prefill_tokens": None}):
        arrangement = replace(life.arrangement, **plain)
        if arrangement != life.arrangement:
            yield replace(life, arrangement=arrangement)
