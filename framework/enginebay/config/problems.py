"""Turns pydantic's complaints into ours: one line a fault, with the path, its source and what to write instead."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from enginebay.config.suggest import unknown_key
from enginebay.config.tree import Path, dotted, tree_of
from enginebay.errors import ConfigError


def config_error(problems: Iterable[str]) -> ConfigError:
    """All faults of one load as one error."""
    lines = list(dict.fromkeys(problems))
    if len(lines) == 1:
        return ConfigError(lines[0])
    return ConfigError(f"{len(lines)} errors in the configuration:\n  " + "\n  ".join(lines))


def describe(
    model: type[BaseModel], data: Mapping[str, Any], error: ValidationError, label: Callable[[Path], str]
) -> list[str]:
    """One line a path that pydantic complained of; `label` renders a path with its source."""
    tree = tree_of(model)
    lines: dict[Path, str] = {}
    for fault in error.errors(include_url=False):
        path = _data_path(fault["loc"], data, missing=fault["type"] == "missing")
        if fault["type"] == "extra_forbidden":
            text = unknown_key(tree, path)
        elif fault["type"] == "missing":
            text = f"missing; expected {tree.expected(path)}"
        elif fault["type"] == "string_too_short" and not fault["input"]:
            text = f"expected {tree.expected(path)}, got an empty one; leave the key out for its default"
        elif fault["type"] in ("unsupported", "value_error") or not tree.at(path):
            text = fault["msg"].removeprefix("Value error, ")
        else:
            text = f"expected {tree.expected(path)}, got {show(fault['input'])}"
        lines.setdefault(path, f"{label(path)}: {text}")
    return list(lines.values())


def validate_options(
    model: type[BaseModel], options: Mapping[str, Any], path: str, where: Callable[[str], str] | None = None
) -> BaseModel:
    """Check a plugin's own options against its record's model.

    Parameters
    ----------
    model
        ``record.options``.
    options
        What stands under `path` in the configuration.
    path
        Dotted path of the options, e.g. ``"attention.options"``.
    where
        Renders the place where a dotted path was written, e.g. ``loaded.where``; left out of messages if None.

    Raises
    ------
    ConfigError
        Every unknown key and wrong value at once.
    """

    def label(below: Path) -> str:
        full = dotted((path, *below))
        place = where(full) if where else ""
        return f"{full} ({place})" if place else full

    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        raise config_error(describe(model, options, error, label)) from None


def show(value: Any) -> str:
    """A value as YAML would have it, with its kind where that is what went wrong."""
    if isinstance(value, str):
        return f"the text {json.dumps(value, ensure_ascii=False)}"
    return json.dumps(value, default=repr, ensure_ascii=False)


def _data_path(loc: Sequence[str | int], data: Any, *, missing: bool) -> Path:
    """`loc` without the names of union members and types that pydantic mixes into it."""
    path: list[str | int] = []
    for i, key in enumerate(loc):
        in_mapping = isinstance(data, Mapping) and key in data
        if in_mapping or (isinstance(data, list | tuple) and isinstance(key, int) and key < len(data)):
            data = data[key]
            path.append(key)
        elif missing and i == len(loc) - 1:
            path.append(key)
    return tuple(path)
