"""What the laws about records share: a demand that a record meets is taken, one beyond it is refused with a reason.

It imports no torch and knows no kind's features: those are its callers'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from enginebay.plugins.records import AttentionRecord, Record
from enginebay.plugins.requirements import Hardware, Requirements

#: codes of reasons that speak of what is installed
NOT_INSTALLED = ("missing_module", "distribution", "library")


@dataclass(frozen=True)
class Undeclared:
    """Something that a record does not declare."""

    #: the feature, and what is wanted of it
    feature: str
    value: Any
    #: fields of `Requirements`, and what they are where it is wanted
    changes: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return f"{self.feature} {self.value}"


def home(record: Record) -> Hardware:
    """A device that the record declares."""
    if "cpu" in record.devices:
        return Hardware(device="cpu")
    least = record.min_capability if isinstance(record, AttentionRecord) else None
    return Hardware(device=record.devices[0], capability=least or (9, 0))


def require_accepted(record: Record, demand: Requirements, what: object = "") -> None:
    """Fail unless the record refuses `demand` for nothing but what is not installed."""
    reasons = [reason for reason in record.supports(demand).reasons if reason.code not in NOT_INSTALLED]
    assert not reasons, f"{what or 'what the record declares'} is refused: {'; '.join(map(str, reasons))}"


def require_refused(record: Record, beyond: Requirements, within: Requirements, what: object) -> None:
    """Fail unless `beyond` is refused by a reason that `within` is not refused by, and that explains itself."""
    support, before = record.supports(beyond), record.supports(within).reasons
    new = [reason for reason in support.reasons if reason not in before]
    assert not support.ok, f"{what} is accepted, though the record does not declare it"
    assert new, f"{what} is refused without a reason of its own"
    for reason in new:
        assert reason.code, reason
        assert reason.detail or (reason.wanted and reason.allowed), (
            f"{reason!r} says neither what was wanted nor why not"
        )
