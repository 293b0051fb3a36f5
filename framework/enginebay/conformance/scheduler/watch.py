"""What a simulation watches: each check belongs to a topic, and a law asks for its own topic only.

It knows neither schedulers nor steps.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, get_args

Topic = Literal[
    "abort",
    "preemption",
    "form",
    "running",
    "budget",
    "seats",
    "flight",
    "blocks",
    "retirement",
    "skipping",
    "seniority",
    "refusal",
    "fields",
    "stats",
    "answers",
    "conservation",
    "liveness",
]
TOPICS: tuple[Topic, ...] = get_args(Topic)
#: what is broken of these does not keep a simulation from going on
HARMLESS: frozenset[Topic] = frozenset({"fields", "stats", "budget", "skipping", "seniority"})


class Violation(AssertionError):
    """A scheduler broke what is watched."""

    def __init__(self, topic: Topic, text: str) -> None:
        super().__init__(f"{text} [{topic}]")
        self.topic = topic


class OutOfScope(Exception):
    """A scheduler broke something that is not watched here: what follows cannot be judged, and another law says it."""


class Watch:
    """Checks by topic.

    Parameters
    ----------
    topics
        Those whose checks raise `Violation`. A failed check of another raises `OutOfScope`, or nothing if it is `HARMLESS`.
        None: all are watched.
    notes
        Where given, failed checks of `HARMLESS` topics are noted here, the first of each, and raise nothing.
    """

    def __init__(self, topics: Collection[Topic] | None = None, notes: dict[Topic, str] | None = None) -> None:
        self._topics = frozenset(TOPICS if topics is None else topics)
        self._notes = notes

    def watches(self, topic: Topic) -> bool:
        """Whether `topic` is watched."""
        return topic in self._topics

    def expect(self, topic: Topic, holds: bool, text: str, *values: object) -> None:
        """Fail unless `holds`; `values` fill the braces of `text`, only then."""
        if not holds:
            self.fail(topic, text, *values)

    def fail(self, topic: Topic, text: str, *values: object) -> None:
        """Fail."""
        if topic in HARMLESS and self._notes is not None:
            self._notes.setdefault(topic, f"{text.format(*values)} [{topic}]")
        elif topic in self._topics:
            raise Violation(topic, text.format(*values))
        elif topic not in HARMLESS:
            raise OutOfScope(topic)
