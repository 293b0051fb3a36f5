"""The doctor: loads every installed plugin and says what it finds. It never raises and chooses nothing."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Literal

from enginebay.errors import PluginConflictError, PluginError
from enginebay.plugins.catalogue import DISABLE_VARIABLE, Catalogue
from enginebay.plugins.hookspecs import PROVISION_HOOKS
from enginebay.plugins.loader import PluginLoader
from enginebay.plugins.metadata import Entry
from enginebay.plugins.records import importable

#: ``note``: nothing is broken, but somebody may be surprised
FindingStatus = Literal["ok", "disabled", "conflict", "broken", "note"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One plugin, or one distribution's metadata, and how it is."""

    status: FindingStatus
    #: empty where the finding is about metadata
    kind: str = ""
    name: str = ""
    distribution: str = ""
    version: str = ""
    #: the metadata directory
    path: str = ""
    message: str = ""
    #: the plugin's own exception in full; empty if it raised none
    traceback: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether the plugin cannot be used though nobody switched it off."""
        return self.status in ("broken", "conflict")


def diagnose(catalogue: Catalogue | None = None) -> tuple[Finding, ...]:
    """Load every installed plugin and report on each, then on the metadata around them."""
    try:
        loader = PluginLoader(catalogue)
    except PluginError as error:  # registry.toml itself
        return (Finding(status="broken", message=str(error)),)
    found = [_examine(entry, loader) for entry in loader.catalogue.entries]
    return (*found, *_metadata_notes(loader.catalogue))


def _examine(entry: Entry, loader: PluginLoader) -> Finding:
    status: FindingStatus = "ok"
    message = trace = ""
    word = loader.catalogue.disabled_by(entry)
    if word is not None:
        status, message = "disabled", f"by {DISABLE_VARIABLE}={word}"
    else:
        try:
            record = loader.load(entry.kind, entry.name).record
            if missing := [module for module in record.requires if not importable(module)]:
                message = f"not usable here: pip install {record.install or ' '.join(missing)}"
        except PluginConflictError as error:
            status, message = "conflict", str(error)
        except PluginError as error:
            status, message = "broken", str(error)
            trace = "" if error.__cause__ is None else "".join(traceback.format_exception(error.__cause__))
    return Finding(
        status=status,
        kind=entry.kind,
        name=entry.name,
        distribution=entry.distribution,
        version=entry.version,
        path=entry.path,
        message=message,
        traceback=trace,
    )


def _metadata_notes(catalogue: Catalogue) -> list[Finding]:
    notes = [
        Finding(
            status="note",
            distribution=copy.distribution,
            version=copy.version,
            path=copy.path,
            message=f"not used: {catalogue.copy_of(copy.distribution).origin} shadows it; remove the one that is stale",
        )
        for copy in catalogue.shadowed
    ]
    notes += [
        Finding(
            status="note",
            kind=entry.kind,
            name=entry.name,
            distribution=entry.distribution,
            version=entry.version,
            path=entry.path,
            message=f"this host knows no kind {entry.kind!r}, only {', '.join(PROVISION_HOOKS)}",
        )
        for entry in catalogue.foreign
    ]
    notes += [
        Finding(status="note", name=word, message=f"{DISABLE_VARIABLE} names it, but nothing installed matches")
        for word in catalogue.unmatched_words
    ]
    return notes
