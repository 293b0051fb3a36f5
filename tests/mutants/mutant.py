"""A mutant: a plugin that is broken in one way, and the law that has to find it."""

from __future__ import annotations

from dataclasses import dataclass

from enginebay.plugins.records import Record


@dataclass(frozen=True)
class Mutant:
    """A broken plugin."""

    name: str
    #: what is wrong with it
    fault: str
    #: the first law that it breaks
    law: str
    record: Record
    #: the device that it takes to see it
    device: str = "cpu"
    #: whether this machine can show the fault
    shown_here: bool = True
