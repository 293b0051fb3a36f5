"""The catalogue: which plugins are installed, and which are known to exist. It imports none of them.

It reads installed metadata (entry points in the groups ``enginebay.<kind>``) and registry.toml. It knows names,
distributions and paths; it does not know what a plugin can do, since that takes its record, and so an import.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from enginebay.errors import PluginConflictError, PluginError, PluginNotFoundError
from enginebay.plugins.hookspecs import PROVISION_HOOKS
from enginebay.plugins.metadata import DistributionCopy, Entry, normalize, scan
from enginebay.plugins.registry import KnownPlugin, read_registry
from enginebay.plugins.suggest import did_you_mean

#: Comma-separated ``kind:name``, ``name`` or distribution: plugins that must not be used.
DISABLE_VARIABLE = "ENGINEBAY_DISABLE_PLUGINS"


@dataclass(frozen=True)
class Catalogue:
    """What metadata says is there, as of one moment."""

    #: the copies in use, one a distribution
    copies: tuple[DistributionCopy, ...]
    #: other copies of the same distributions, which are not used: ``shadowed[i]`` belongs to a name in `copies`
    shadowed: tuple[DistributionCopy, ...] = ()
    known: tuple[KnownPlugin, ...] = ()
    #: the words of ``ENGINEBAY_DISABLE_PLUGINS``
    disabled: tuple[str, ...] = ()

    @classmethod
    def discover(
        cls,
        path: Sequence[str] | None = None,
        *,
        known: Iterable[KnownPlugin] | None = None,
        disabled: str | None = None,
    ) -> Catalogue:
        """Read the metadata under `path`.

        Parameters
        ----------
        path
            Directories to search; None: ``sys.path``.
        known
            Known plugins; None: those of the packaged registry.toml.
        disabled
            What is switched off; None: the value of ``ENGINEBAY_DISABLE_PLUGINS``.
        """
        copies, shadowed = scan(path)
        words = os.environ.get(DISABLE_VARIABLE, "") if disabled is None else disabled
        return cls(
            copies=copies,
            shadowed=shadowed,
            known=read_registry() if known is None else tuple(known),
            disabled=tuple(word.strip() for word in words.split(",") if word.strip()),
        )

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Every installed plugin of a kind that this host has, by kind, name and distribution."""
        found = (e for copy in self.copies for e in copy.entries if e.kind in PROVISION_HOOKS)
        kinds = list(PROVISION_HOOKS)
        return tuple(sorted(found, key=lambda e: (kinds.index(e.kind), e.name.lower(), e.name, e.distribution)))

    @property
    def foreign(self) -> tuple[Entry, ...]:
        """Entry points in an ``enginebay.`` group that this host does not know."""
        return tuple(e for copy in self.copies for e in copy.entries if e.kind not in PROVISION_HOOKS)

    @property
    def unmatched_words(self) -> tuple[str, ...]:
        """Words of ``ENGINEBAY_DISABLE_PLUGINS`` that match nothing installed."""
        return tuple(w for w in self.disabled if not any(_matches(w, entry) for entry in self.entries))

    @property
    def not_installed(self) -> tuple[KnownPlugin, ...]:
        """Plugins of registry.toml that no installed distribution provides."""
        installed = {(e.kind, e.name) for e in self.entries}
        return tuple(k for k in self.known if (k.kind, k.name) not in installed)

    def named(self, kind: str, name: str) -> tuple[Entry, ...]:
        """All installed claims to a name, disabled ones included."""
        return tuple(e for e in self.entries if e.kind == kind and e.name == name)

    def names(self, kind: str) -> tuple[str, ...]:
        """The installed names of a kind, each once, disabled and conflicting ones included."""
        return tuple(dict.fromkeys(e.name for e in self.entries if e.kind == kind))

    def disabled_by(self, entry: Entry) -> str | None:
        """The word of ``ENGINEBAY_DISABLE_PLUGINS`` that switches `entry` off, or None."""
        return next((word for word in self.disabled if _matches(word, entry)), None)

    def claims(self, kind: str, name: str) -> tuple[Entry, ...]:
        """Claims to a name that are not disabled; more than one is a conflict."""
        return tuple(e for e in self.named(kind, name) if self.disabled_by(e) is None)

    def known_plugin(self, kind: str, name: str) -> KnownPlugin | None:
        """The plugin's table in registry.toml, or None."""
        return next((k for k in self.known if (k.kind, k.name) == (kind, name)), None)

    def find(self, kind: str, name: str, also: Iterable[tuple[str, str]] = ()) -> Entry:
        """The one installed plugin of that kind and name.

        Raises `PluginNotFoundError` (with what was found and `also`, further names and origins that the caller knows),
        `PluginConflictError`, or a `PluginError` if it is disabled.
        """
        claims = self.claims(kind, name)
        if len(claims) == 1:
            return claims[0]
        if claims:
            raise PluginConflictError(conflict_message(kind, name, [entry.origin for entry in claims]))
        if off := self.named(kind, name):
            words = ", ".join(sorted({str(self.disabled_by(entry)) for entry in off}))
            raise PluginError(
                f"{kind}:{name} ({off[0].origin}) is switched off by {DISABLE_VARIABLE}={words}. "
                f"Take that word out of {DISABLE_VARIABLE}, or name another plugin."
            )
        raise PluginNotFoundError(self._not_found_message(kind, name, tuple(also)))

    def _not_found_message(self, kind: str, name: str, also: tuple[tuple[str, str], ...]) -> str:
        names = [*self.names(kind), *(other for other, _ in also)]
        near = names + [k.name for k in self.known if k.kind == kind]
        what = f"no installed plugin serves the architecture {name!r}." if kind == "model" else ""
        lines = [(what or f"no installed plugin of the kind {kind} is named {name!r}.") + did_you_mean(name, near)]
        origins = [(e.name, e.origin) for e in self.entries if e.kind == kind]
        found = [f"{other} ({origin})" for other, origin in (*origins, *also)]
        lines.append("  found: " + ("\n         ".join(found) or "none"))
        lines += [f"  {e.kind}:{e.name} is of another kind" for e in self.entries if e.name == name]
        if known := self.known_plugin(kind, name):
            lines.append(f"  it exists ({known.summary}) but is not installed: {known.install}")
        lines += [
            f"  {copy.origin} declares it, but is shadowed by {self.copy_of(copy.distribution).origin}: remove the "
            "one that is stale"
            for copy in self.shadowed
            if any((e.kind, e.name) == (kind, name) for e in copy.entries)
        ]
        return "\n".join(lines)

    def copy_of(self, distribution: str) -> DistributionCopy:
        """The copy of a distribution that is in use."""
        return next(copy for copy in self.copies if copy.distribution == distribution)

    def shadowed_copies(self, distribution: str) -> tuple[DistributionCopy, ...]:
        """Copies of a distribution that are not in use: stale metadata, or a second installation."""
        return tuple(copy for copy in self.shadowed if copy.distribution == distribution)


def conflict_message(kind: str, name: str, origins: Sequence[str]) -> str:
    """What to say when several plugins claim one name."""
    claims = "".join(f"\n  {origin}" for origin in origins)
    return (
        f"{kind}:{name} is claimed by {len(origins)} plugins:{claims}\n"
        f"Uninstall all but one, or switch others off by distribution with {DISABLE_VARIABLE}."
    )


def _matches(word: str, entry: Entry) -> bool:
    # Distribution names compare as pip does it: acme_attention is acme-attention.
    if word in (entry.name, f"{entry.kind}:{entry.name}"):
        return True
    return normalize(entry.distribution) == normalize(word)
