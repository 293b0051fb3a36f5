"""A mutant: a plugin that is broken in one way, and the law that has to find it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar

from enginebay.plugins.records import Record
from enginebay.plugins.requirements import Requirements, Support

R = TypeVar("R", bound=Record)


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


def accepts_everything(record: R) -> R:
    """The record with an answer that is always yes."""
    return _answering(record, lambda _self, _req: Support(True))


def refuses_without_a_word(record: R) -> R:
    """The record with an answer to what it does not support that is a bare no."""
    return _answering(record, lambda _self, req: Support(record.supports(req).ok))


def _answering(record: R, supports: Callable[[R, Requirements], Support]) -> R:
    kind = type(record)
    broken: type[R] = type(f"Broken{kind.__name__}", (kind,), {"supports": supports})
    return broken(**{field.name: getattr(record, field.name) for field in fields(record)})
