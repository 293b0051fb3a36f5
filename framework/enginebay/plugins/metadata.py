"""Installed metadata: every distribution that declares an ``enginebay.*`` entry point, duplicates included.

importlib.metadata keeps the first copy of a distribution that it meets and is silent about the others, so a stale
``*.dist-info`` can hide the live one. Here all copies are kept, the order is fixed, and the paths are known. Nothing is
imported. What the entry points mean is not known here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path

from packaging.version import InvalidVersion, Version

logger = logging.getLogger(__name__)

GROUP_PREFIX = "enginebay."


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry point: a plugin by kind and name, and whose it is."""

    kind: str
    name: str
    #: ``module`` or ``module:attribute``
    value: str
    distribution: str
    version: str
    #: the ``*.dist-info`` (or ``*.egg-info``) that declares it
    path: str

    @property
    def module(self) -> str:
        """The module to import."""
        return self._value[0]

    @property
    def attribute(self) -> str:
        """The plugin object in the module; empty: the module is the plugin."""
        return self._value[1]

    @property
    def _value(self) -> tuple[str, str]:
        module, _, attribute = self.value.partition("[")[0].partition(":")
        return module.strip(), attribute.strip()

    @property
    def origin(self) -> str:
        """``acme 1.0 at /path/acme-1.0.dist-info``."""
        return f"{self.distribution} {self.version} at {self.path}"


@dataclass(frozen=True, kw_only=True)
class DistributionCopy:
    """One metadata directory of a distribution."""

    distribution: str
    #: empty when the directory has no METADATA left
    version: str
    path: str
    #: one line for people, from METADATA
    summary: str = ""
    entries: tuple[Entry, ...] = ()

    @property
    def origin(self) -> str:
        """``acme 1.0 at /path/acme-1.0.dist-info``."""
        return f"{self.distribution} {self.version or '(no METADATA)'} at {self.path}"


def normalize(name: str) -> str:
    """A distribution's name as indexes compare it: ``Acme_Attention`` -> ``acme-attention``."""
    return re.sub(r"[-_.]+", "-", name).lower()


def scan(path: Sequence[str] | None = None) -> tuple[tuple[DistributionCopy, ...], tuple[DistributionCopy, ...]]:
    """Return the copies in use, one a distribution, and the shadowed ones.

    A copy without METADATA is never in use where another has it. Then the first directory of `path` (None:
    ``sys.path``) wins, as for imports, and within a directory the one that has a RECORD, then the highest version.
    """
    groups: dict[str, list[_Found]] = {}
    places: dict[Path, int] = {}
    seen: set[Path] = set()
    found_here = metadata.distributions() if path is None else metadata.distributions(path=list(path))
    for distribution in found_here:
        found = _Found(distribution)
        if found.path in seen:  # one directory reached by two sys.path entries
            continue
        seen.add(found.path)
        found.place = places.setdefault(found.path.parent, len(places))
        groups.setdefault(found.normalized, []).append(found)
    used: list[DistributionCopy] = []
    shadowed: list[DistributionCopy] = []
    for group in groups.values():
        if not any(found.points for found in group):
            continue
        ranked = sorted(group, key=lambda found: found.rank, reverse=True)
        name = ranked[0].name
        first, *others = (found.copy(name) for found in ranked)
        used.append(first)
        shadowed += others
    return tuple(used), tuple(shadowed)


class _Found:
    """A metadata directory, read no further than it takes: METADATA is parsed only where it matters."""

    def __init__(self, distribution: metadata.Distribution) -> None:
        self._distribution = distribution
        # The metadata directory has no public name; a distribution of another finder says where its files are.
        self.path = Path(str(getattr(distribution, "_path", distribution.locate_file("")))).resolve()
        self.place = 0

    @cached_property
    def normalized(self) -> str:
        # The folder's name saves parsing METADATA of the many packages that have nothing to do with us.
        if self.points or self.path.suffix not in (".dist-info", ".egg-info"):
            return normalize(self.name)
        return normalize(self._folder_name)

    @cached_property
    def points(self) -> list[metadata.EntryPoint]:
        try:
            return [p for p in self._distribution.entry_points if p.group.startswith(GROUP_PREFIX)]
        except UnicodeDecodeError as error:  # another package's damage must not stop the listing of the rest
            logger.warning("%s: entry_points.txt cannot be read and is left out: %s", self.path, error)
            return []

    @property
    def name(self) -> str:
        return self._header("Name") or self._folder_name

    @property
    def _folder_name(self) -> str:
        """``/path/acme-1.0.dist-info`` -> ``acme``."""
        return re.sub(r"-\d.*", "", self.path.stem)

    @property
    def rank(self) -> tuple[bool, int, bool, Version]:
        """Greater is better."""
        try:
            version = Version(self._header("Version"))
        except InvalidVersion:
            version = Version("0")
        return bool(self._header("Version")), -self.place, self._distribution.read_text("RECORD") is not None, version

    def copy(self, name: str) -> DistributionCopy:
        """What is known of it, under the distribution's `name`."""
        version, path = self._header("Version"), str(self.path)
        entries = tuple(
            Entry(
                kind=point.group.removeprefix(GROUP_PREFIX),
                name=point.name,
                value=point.value,
                distribution=name,
                version=version,
                path=path,
            )
            for point in self.points
        )
        return DistributionCopy(
            distribution=name, version=version, path=path, summary=self._header("Summary"), entries=entries
        )

    def _header(self, key: str) -> str:
        headers = self._distribution.metadata
        return str(headers[key]) if key in headers else ""
