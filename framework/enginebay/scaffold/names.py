"""The names of a new plugin: what it is called in YAML, as a distribution and as a module. It writes nothing."""

from __future__ import annotations

import importlib.util
import keyword
import re
from dataclasses import dataclass

import yaml

from enginebay.errors import PluginConflictError, PluginError
from enginebay.plugins.catalogue import Catalogue
from enginebay.plugins.selection import AUTO

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
#: so that no line of a template grows beyond what the formatter leaves as it is
_LONGEST = 32


@dataclass(frozen=True)
class PluginNames:
    """One plugin's names."""

    #: the word written in YAML
    name: str

    @property
    def distribution(self) -> str:
        """What pip installs: ``my_attention`` -> ``enginebay-my-attention``."""
        return f"enginebay-{self.name.replace('_', '-')}"

    @property
    def module(self) -> str:
        """What Python imports: ``my_attention`` -> ``enginebay_my_attention``."""
        return f"enginebay_{self.name}"

    @property
    def title(self) -> str:
        """For a class: ``my_attention`` -> ``MyAttention``."""
        return "".join(part.capitalize() for part in self.name.split("_"))


def new_names(kind: str, name: str, catalogue: Catalogue) -> PluginNames:
    """The names of a new plugin; raises `PluginError` for what is no name, `PluginConflictError` for one that is taken."""
    _require_name(name)
    names = PluginNames(name)
    if taken := catalogue.named(kind, name):
        raise PluginConflictError(f"{kind}:{name} is installed already ({taken[0].origin}); choose another name")
    if known := catalogue.known_plugin(kind, name):
        raise PluginConflictError(
            f"{kind}:{name} is the name of a known plugin ({known.summary}), so nobody could install both; choose another name"
        )
    if importlib.util.find_spec(names.module) is not None:
        raise PluginConflictError(
            f"a module named {names.module} is installed already, and yours would take its place; choose another name"
        )
    return names


def _require_name(name: str) -> None:
    if len(name) > _LONGEST:
        raise PluginError(f"{name[:_LONGEST]!r}… has {len(name)} characters; a plugin's name has at most {_LONGEST}")
    if not _NAME.fullmatch(name):
        raise PluginError(
            f"{name!r} cannot name a plugin: a name is of lower-case letters, digits and single underscores, and begins with a "
            f"letter{_nearest(name)}"
        )
    if whose := _reserved_by(name):
        raise PluginError(f"{name!r} is {whose}; choose another name, such as {f'my_{name}'!r}")


def _reserved_by(name: str) -> str:
    """Whose word a well-formed name is already; empty: nobody's."""
    if name == AUTO:
        return "the host's word for its own choice"
    if keyword.iskeyword(name):
        return "a word of Python's"
    return "" if yaml.safe_load(name) == name else "a word of YAML's"


def _nearest(name: str) -> str:
    """``", such as 'my_attn'"`` where a valid name is near."""
    near = (
        re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
        .strip("_")
        .lstrip("0123456789_")
    )
    return f", such as {near!r}" if _NAME.fullmatch(near) and not _reserved_by(near) else ""
