"""Writing a package from the templates. It knows what a template may say, and not whether a name is free (`names`)."""

from __future__ import annotations

import string
from collections.abc import Iterator
from pathlib import Path

from enginebay import __version__
from enginebay.conformance.suite_names import SUITE_OF_KIND
from enginebay.errors import EngineBayError, PluginError
from enginebay.plugins.hookspecs import PROVISION_HOOKS
from enginebay.plugins.records import API_VERSION, Kind
from enginebay.plugins.suggest import did_you_mean
from enginebay.scaffold.names import PluginNames

_TEMPLATES = Path(__file__).parent / "templates"

_KEYS: dict[Kind, str] = {"attention": "attention.backend", "scheduler": "scheduler.policy"}
#: kind -> the key of engine.yaml that names a plugin of it; a package holds its kind's suite, so there is none without one
YAML_KEYS = {kind: key for kind, key in _KEYS.items() if kind in SUITE_OF_KIND}


def require_kind(word: str) -> Kind:
    """The kind that `word` names; raises `PluginError` if there are no templates of it."""
    for kind in YAML_KEYS:
        if kind == word:
            return kind
    there_are = f"there are packages to begin with for {' and '.join(YAML_KEYS)}"
    if word not in PROVISION_HOOKS:
        raise PluginError(f"{word!r} is not a kind; {there_are}.{did_you_mean(word, YAML_KEYS)}")
    raise PluginError(
        f"there is no package to begin with for the kind {word}; {there_are}. The docstring of {PROVISION_HOOKS[word]} in "
        "enginebay.plugins.hookspecs holds a complete plugin of it"
    )


def write_package(kind: Kind, names: PluginNames, out: Path) -> Path:
    """Write the package's folder into `out` and return it; a folder that exists is refused, so nothing is overwritten."""
    folder = out / names.distribution
    try:
        out.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        for path, text in _files(kind, names):
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except FileExistsError as error:
        raise EngineBayError(
            f"{error.filename} exists already, and nothing is written over it; choose another name or folder (--out)"
        ) from error
    except OSError as error:
        raise EngineBayError(f"{folder} cannot be written: {error}") from error
    return folder


def _files(kind: Kind, names: PluginNames) -> Iterator[tuple[Path, str]]:
    """Each file's path in the package, and its text."""
    values = {
        "api_version": str(API_VERSION[kind]),
        "distribution": names.distribution,
        "key": YAML_KEYS[kind],
        "kind": kind,
        "module": names.module,
        "name": names.name,
        "section": YAML_KEYS[kind].partition(".")[0],
        "setting": YAML_KEYS[kind].partition(".")[2],
        "suite": SUITE_OF_KIND[kind],
        "title": names.title,
        "version": __version__,
    }
    for root in (_TEMPLATES / "any", _TEMPLATES / kind):
        for template in sorted(root.rglob("*.tmpl")):
            path = template.relative_to(root).with_suffix("")
            parts = [names.module if part == "module" else part for part in path.parts]
            yield Path(*parts), string.Template(template.read_text(encoding="utf-8")).substitute(values)
