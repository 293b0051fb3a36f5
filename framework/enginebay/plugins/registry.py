"""registry.toml: the plugins known to exist, installed or not. It holds no code and imports none.

The file stands at the project's root; the package carries it beside ``enginebay/__init__.py``.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from enginebay.errors import PluginError
from enginebay.plugins.hookspecs import PROVISION_HOOKS

#: ``in-tree``: ships with enginebay; the others are a third party's own word for it
Status = Literal["in-tree", "stable", "experimental", "unmaintained"]

REGISTRY_FILE = Path(__file__).parent.parent / "registry.toml"


@dataclass(frozen=True, kw_only=True)
class KnownPlugin:
    """One ``[[plugin]]`` table of registry.toml."""

    kind: str
    name: str
    #: one line for people
    summary: str
    #: the command that installs it
    install: str
    #: where its source is: a folder of this project, or a URL
    source: str
    devices: tuple[str, ...]
    status: Status


def read_registry(path: Path = REGISTRY_FILE) -> tuple[KnownPlugin, ...]:
    """Read and check registry.toml; an error names the file, the table and the key."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get("plugin", [])
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PluginError(f"{path}: cannot be read: {error}. Reinstall enginebay.") from error
    known = tuple(_known(table, f"{path}: plugin[{index}]") for index, table in enumerate(tables))
    seen: set[tuple[str, str]] = set()
    for plugin in known:
        if (plugin.kind, plugin.name) in seen:
            raise PluginError(f"{path}: {plugin.kind}:{plugin.name} is listed twice; remove one")
        seen.add((plugin.kind, plugin.name))
    return known


def _known(table: dict[str, Any], where: str) -> KnownPlugin:
    keys = {f.name for f in fields(KnownPlugin)}
    if wrong := sorted(keys.symmetric_difference(table)):
        raise PluginError(f"{where}: keys must be exactly {', '.join(sorted(keys))}; missing or unknown: {wrong}")
    if table["kind"] not in PROVISION_HOOKS:
        raise PluginError(f"{where}: kind {table['kind']!r} is not one of {', '.join(PROVISION_HOOKS)}")
    if table["status"] not in get_args(Status):
        raise PluginError(f"{where}: status {table['status']!r} is not one of {', '.join(get_args(Status))}")
    return KnownPlugin(**{**table, "devices": tuple(table["devices"])})
