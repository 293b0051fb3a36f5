"""Which plugin it is, exactly: what the parent process tells its children, and how they compare.

It knows names, versions and hashes; it does not know how a plugin is found or loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from enginebay.errors import PluginMismatchError


@dataclass(frozen=True, order=True)
class PluginIdentity:
    """A plugin by kind and name, and the exact code behind it: a distribution's version, or a local file's hash."""

    kind: str
    name: str
    #: the distribution's name, or a local plugin file's absolute path
    distribution: str
    #: the distribution's version; empty for a local file
    version: str = ""
    #: SHA-256 of a local plugin file, in hexadecimal; empty for a distribution
    sha256: str = ""

    @property
    def is_local(self) -> bool:
        """Whether it is a file named in YAML and not an installed distribution."""
        return bool(self.sha256)

    @property
    def origin(self) -> str:
        """The code behind it, for people: ``acme 1.0`` or ``/path/acme.py sha256:0123456789ab``."""
        return f"{self.distribution} {f'sha256:{self.sha256[:12]}' if self.is_local else self.version}"

    def __str__(self) -> str:
        return f"{self.kind}:{self.name} ({self.origin})"


def compare_plugin_sets(parent: Iterable[PluginIdentity], own: Iterable[PluginIdentity]) -> None:
    """Raise `PluginMismatchError` unless this process loaded exactly what its parent resolved.

    Parameters
    ----------
    parent
        What the parent resolved and sent.
    own
        What this process loaded.
    """
    theirs, ours = _by_bay(parent), _by_bay(own)
    lines = [
        f"  {kind}:{name}: the parent resolved {_origins(theirs, (kind, name))}, "
        f"this process has {_origins(ours, (kind, name))}"
        for kind, name in sorted(theirs.keys() | ours.keys())
        if theirs.get((kind, name)) != ours.get((kind, name))
    ]
    if lines:
        raise PluginMismatchError(
            "this process did not load the plugins that its parent resolved:\n"
            + "\n".join(lines)
            + "\nInstall the same distributions for both, and do not edit a local plugin file while the engine starts."
        )


def _by_bay(identities: Iterable[PluginIdentity]) -> dict[tuple[str, str], set[PluginIdentity]]:
    bays: dict[tuple[str, str], set[PluginIdentity]] = {}
    for identity in identities:
        bays.setdefault((identity.kind, identity.name), set()).add(identity)
    return bays


def _origins(bays: dict[tuple[str, str], set[PluginIdentity]], bay: tuple[str, str]) -> str:
    return " and ".join(i.origin for i in sorted(bays.get(bay, ()))) or "none"
