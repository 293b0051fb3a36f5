"""Selections: what fills a bay, who chose it, what was rejected and why, and what the choice switched off.

Plain data. How a choice is made is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from enginebay.plugins.identity import PluginIdentity
from enginebay.plugins.records import AttentionRecord, KVLayout, Record
from enginebay.plugins.requirements import Reason

#: the word that leaves a choice to the resolver
AUTO = "auto"

#: a part of the attention bay: a group of layers, by `CacheKind`, and a phase
AttentionPart = tuple[str, str]


@dataclass(frozen=True)
class Rejected:
    """A candidate that does not fill the bay."""

    name: str
    #: the distribution and version, or the local file and hash
    origin: str
    reasons: tuple[Reason, ...]


#: the feature that a scheduler or an executor without it costs
ASYNC_SCHEDULING = "asynchronous scheduling"


@dataclass(frozen=True)
class SwitchedOff:
    """A feature that a choice costs."""

    feature: str
    #: the plugin that switches it off
    by: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The answer for one bay, or for a part of it."""

    kind: str
    #: the name asked for, or ``"auto"``
    wanted: str
    #: where the choice comes from: ``"auto"``, or the place that named it, e.g. ``"yaml"``, ``"cli"``
    source: str
    #: None: the bay stays empty, and `note` says why
    chosen: Record | None
    identity: PluginIdentity | None
    #: the part of the bay: a phase, a group of layers, or ``group.phase``; empty: all of it
    label: str = ""
    note: str = ""
    rejected: tuple[Rejected, ...] = ()
    switched_off: tuple[SwitchedOff, ...] = ()

    @property
    def bay(self) -> str:
        """``attention.decode``, ``attention.sliding.decode``, or only the kind."""
        return f"{self.kind}.{self.label}" if self.label else self.kind


@dataclass(frozen=True, kw_only=True)
class AttentionSelection:
    """The attention bay: a backend for every phase of every group of layers, and what all of them agree on."""

    #: part -> its selection; the same object where one answer holds for several
    parts: Mapping[AttentionPart, Selection]
    layout: KVLayout
    #: tokens a cache block
    block_size: int
    kv_dtype: str

    @property
    def selections(self) -> tuple[Selection, ...]:
        """Each selection once, for reports."""
        return tuple({id(s): s for s in self.parts.values()}.values())

    @property
    def records(self) -> dict[str, AttentionRecord]:
        """The chosen backends by name."""
        return {record.name: record for record in map(self.record, self.parts)}

    def record(self, part: AttentionPart) -> AttentionRecord:
        """The record of the backend that computes `part`."""
        record = self.parts[part].chosen
        assert isinstance(record, AttentionRecord)
        return record


def identities(selections: Iterable[Selection]) -> tuple[PluginIdentity, ...]:
    """The chosen plugins, each once: give them to `PluginLoader.identities` and `PluginLoader.observers`."""
    return tuple(sorted({s.identity for s in selections if s.identity is not None}))


def switched_off(selections: Iterable[Selection]) -> tuple[SwitchedOff, ...]:
    """Everything that the choices switched off."""
    return tuple(dict.fromkeys(off for selection in selections for off in selection.switched_off))
