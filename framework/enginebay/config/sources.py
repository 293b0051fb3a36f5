"""Where values come from: a YAML file, the environment, ``--set`` and Python, each read into one kind of tree.

Reading collects faults instead of stopping at the first. It validates nothing but names and texts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import BaseModel

from enginebay.config.suggest import (
    ENV_PREFIX,
    OTHER_VARIABLES,
    selection_refused,
    unknown_variable,
    variable_of_dotted,
)
from enginebay.config.tree import Path, SchemaTree, dotted
from enginebay.config.values import Given, Source, Tree, merge


@dataclass
class Layer:
    """What one source gave, and what was wrong with it."""

    tree: Tree
    problems: list[str]


class _Loader(yaml.SafeLoader):
    """SafeLoader that also reads ``1e-6`` as a number, as YAML 1.2 does."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


class _NodeReader:
    """Turns YAML nodes into trees and keeps each leaf's line."""

    def __init__(self, schema: SchemaTree, source: Callable[[int], Source], problems: list[str]) -> None:
        self._schema = schema
        self._source = source
        self._problems = problems
        self._loader = _Loader("")
        self._open: list[yaml.Node] = []

    def read(self, node: yaml.Node, path: Path) -> Tree | Given:
        """The tree or leaf at `path`; an empty tree where it cannot be read."""
        source = self._source(node.start_mark.line + 1)
        try:
            if isinstance(node, yaml.MappingNode):
                return self._read_mapping(node, path)
            value = self._loader.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError) as error:
            self._problems.append(f"{dotted(path)} ({source}): cannot be read: {_yaml_fault(error)}")
            return {}
        # a section whose keys are all commented out is a null to YAML
        return {} if value is None and self._schema.is_section(path) else Given(value, source)

    def _read_mapping(self, node: yaml.MappingNode, path: Path) -> Tree:
        if node in self._open:
            raise yaml.YAMLError("an alias that contains itself")
        self._check_duplicates(node, path)
        self._loader.flatten_mapping(node)
        self._open.append(node)
        tree: Tree = {}
        for key_node, value_node in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag == "tag:yaml.org,2002:str":
                tree[key_node.value] = self.read(value_node, (*path, key_node.value))
            else:
                at = self._source(key_node.start_mark.line + 1)
                self._problems.append(f"{dotted(path) or 'top level'} ({at}): every key must be a text; quote it")
        self._open.pop()
        return tree

    def _check_duplicates(self, node: yaml.MappingNode, path: Path) -> None:
        first: dict[str, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            line = key_node.start_mark.line + 1
            if key_node.value in first:
                self._problems.append(
                    f"{dotted((*path, key_node.value))} ({self._source(line)}): written twice, "
                    f"first at {self._source(first[key_node.value])}; keep one"
                )
            first.setdefault(key_node.value, line)


def read_yaml(file: str | os.PathLike[str], schema: SchemaTree) -> Layer:
    """The layer of a YAML file. Its relative plugin files and ``./`` model paths become relative to its folder."""
    name = os.fspath(file)
    layer = Layer({}, [])
    try:
        with open(name, encoding="utf-8-sig") as handle:
            node = yaml.compose(handle.read(), _Loader)
    except OSError as error:
        layer.problems.append(f"{name}: cannot be opened: {error.strerror}")
        return layer
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        layer.problems.append(f"{name}{_line_of(error)}: not valid YAML: {_yaml_fault(error)}")
        return layer
    if node is None:
        return layer
    found = _NodeReader(schema, lambda line: Source("yaml", f"{name}:{line}"), layer.problems).read(node, ())
    if isinstance(found, Given):
        layer.problems.append(f"{found.source}: expected a mapping, such as model: smollm2-135m-instruct")
        return layer
    layer.tree = _rebase(found, os.path.dirname(os.path.abspath(name)))
    return layer


def read_environment(env: Mapping[str, str], schema: SchemaTree) -> Layer:
    """The layer of ``ENGINEBAY_<SECTION>__<KEY>`` variables; any other ENGINEBAY_* variable is a fault."""
    layer = Layer({}, [])
    known = {variable_of_dotted(dotted(p)): p for p in schema.leaves() if selection_refused(p) is None}
    for name in sorted(n for n in env if n.startswith(ENV_PREFIX) and n not in OTHER_VARIABLES):
        path: Path = tuple(name.removeprefix(ENV_PREFIX).lower().split("__"))
        exists = name.isupper() and bool(schema.at(path))
        refused = selection_refused(path) if exists else None
        if refused:
            layer.problems.append(f"{name}: {refused}")
        elif name in known or (exists and not schema.keys(path)):
            _put_text(layer, path, env[name], Source("env", name), schema)
        else:
            layer.problems.append(f"{name}: {unknown_variable(name, [*known, *OTHER_VARIABLES], schema)}")
    return layer


def read_settings(settings: Sequence[str], schema: SchemaTree) -> Layer:
    """The layer of ``--set path=value`` options; of two for one path the later holds."""
    layer = Layer({}, [])
    for setting in settings:
        name, equals, text = setting.partition("=")
        path: Path = tuple(name.strip().split("."))
        if not equals or not all(path):
            layer.problems.append(f"--set {setting}: expected PATH=VALUE, such as scheduler.max_num_seqs=8")
            continue
        _put_text(layer, path, text, Source("cli", f"--set {setting}"), schema)
    return layer


def read_python(values: Mapping[str, Any], schema: SchemaTree) -> Layer:
    """The layer of keyword arguments. None means "not given", except where the schema allows null."""
    layer = Layer({}, [])
    layer.tree = _from_python(values, (), schema, layer.problems)
    return layer


def _put_text(layer: Layer, path: Path, text: str, source: Source, schema: SchemaTree) -> None:
    """Read `text` as YAML and put it at `path`; where only a text may stand, ``123`` and ``no`` are texts."""
    value: Tree | Given
    if not text.strip():
        value = Given(None if schema.accepts(path, None) else "", source)
    else:
        try:
            node = yaml.compose(text, _Loader)
        except yaml.YAMLError as error:
            layer.problems.append(f"{dotted(path)} ({source}): not valid YAML: {_yaml_fault(error)}")
            return
        value = {} if node is None else _NodeReader(schema, lambda _: source, layer.problems).read(node, path)
        typed = {} if isinstance(value, dict) else value.value
        if typed is None and schema.at(path) and not schema.accepts(path, None):
            return
        if not schema.accepts(path, typed) and schema.accepts(path, text):
            value = Given(text, source)
    tree: Tree = {str(path[-1]): value}
    for key in reversed(path[:-1]):
        tree = {str(key): tree}
    layer.tree = merge(layer.tree, tree)


def _from_python(values: Mapping[str, Any], path: Path, schema: SchemaTree, problems: list[str]) -> Tree:
    tree: Tree = {}
    for key, value in values.items():
        below = (*path, key)
        if not isinstance(key, str):
            problems.append(f"{dotted(path) or 'top level'} (Python argument): every key must be a text, not {key!r}")
        elif isinstance(value, BaseModel):
            tree[key] = _from_python(value.model_dump(exclude_unset=True), below, schema, problems)
        elif isinstance(value, Mapping):
            tree[key] = _from_python(value, below, schema, problems)
        elif value is not None or not schema.at(below) or schema.accepts(below, None):
            tree[key] = Given(value, Source("python"))
    return tree


def _rebase(tree: Tree, folder: str) -> Tree:
    """Make a file's relative paths absolute."""
    out = dict(tree)
    for key in ("model", "tokenizer"):
        given = out.get(key)
        if isinstance(given, Given) and isinstance(given.value, str) and given.value.startswith(("./", "../")):
            out[key] = Given(os.path.normpath(os.path.join(folder, given.value)), given.source)
    plugins = out.get("plugins")
    if isinstance(plugins, Given) and isinstance(plugins.value, list):
        files = [
            os.path.normpath(os.path.join(folder, os.path.expanduser(p))) if isinstance(p, str) and p else p
            for p in plugins.value
        ]
        out["plugins"] = Given(files, plugins.source)
    return out


def _line_of(error: Exception) -> str:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    return f":{mark.line + 1}" if mark else ""


def _yaml_fault(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        return ", ".join(part for part in (error.context, error.problem) if part)
    return str(error).splitlines()[0]
