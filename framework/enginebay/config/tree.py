"""A pydantic model seen as dotted paths: which keys exist, and what may stand there, in words.

It reads the model's JSON schema, so that messages, `--set` and environment variables cannot disagree with validation.
It knows no values and no sources.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

#: a place in the tree; integers index lists
Path = tuple[str | int, ...]
Node = dict[str, Any]

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list, tuple),
    "object": (dict,),
}


def dotted(path: Path) -> str:
    """``("scheduler", "policy")`` -> ``"scheduler.policy"``."""
    return ".".join(map(str, path))


class SchemaTree:
    """The paths of one model."""

    def __init__(self, model: type[BaseModel]) -> None:
        self._root = model.model_json_schema()

    def at(self, path: Path) -> list[Node]:
        """Every schema that a value at `path` may follow: none if there is no such path, ``[{}]`` if all is free."""
        nodes = self._expand(self._root)
        for key in path:
            nodes = [found for node in nodes for found in self._child(node, key)]
        return nodes

    def keys(self, path: Path) -> list[str]:
        """Known keys below `path`."""
        return list(dict.fromkeys(key for node in self.at(path) for key in node.get("properties", ())))

    def leaves(self, path: Path = ()) -> Iterator[Path]:
        """Paths of every key that has no known keys below it, and of every key that may also be a plain word."""
        for key in self.keys(path):
            below = (*path, key)
            if any("properties" not in node for node in self.at(below)):
                yield below
            yield from self.leaves(below)

    def accepts(self, path: Path, value: Any) -> bool:
        """Whether `value` has a type that may stand at `path`; its range is not looked at."""
        return any(_has_type(node, value) for node in self.at(path))

    def is_section(self, path: Path) -> bool:
        """Whether only a mapping may stand at `path`."""
        nodes = self.at(path)
        return bool(nodes) and all(node.get("type") == "object" for node in nodes)

    def expected(self, path: Path) -> str:
        """What may stand at `path`, in words: ``"auto" or an integer of at least 1``."""
        return " or ".join(dict.fromkeys(_words(node) for node in self.at(path)))

    def _expand(self, node: Node) -> list[Node]:
        if "$ref" in node:
            return self._expand(self._root["$defs"][node["$ref"].rsplit("/", 1)[1]])
        for union in ("anyOf", "oneOf"):
            if union in node:
                return [found for choice in node[union] for found in self._expand(choice)]
        return [node]

    def _child(self, node: Node, key: str | int) -> list[Node]:
        if isinstance(key, int):
            return self._expand(node["items"]) if "items" in node else []
        if key in node.get("properties", ()):
            return self._expand(node["properties"][key])
        if not node:
            return [node]
        extra = node.get("additionalProperties", False)
        if extra is False:
            return []
        return self._expand(extra) if isinstance(extra, dict) else [{}]


@functools.cache
def tree_of(model: type[BaseModel]) -> SchemaTree:
    """The `SchemaTree` of `model`, built once."""
    return SchemaTree(model)


def _has_type(node: Node, value: Any) -> bool:
    if "type" not in node:
        return True
    if isinstance(value, bool):
        return bool(node["type"] == "boolean")
    return isinstance(value, _TYPES[node["type"]])


def _words(node: Node) -> str:
    if "const" in node:
        return json.dumps(node["const"])
    if "enum" in node:
        return "one of " + ", ".join(json.dumps(value) for value in node["enum"])
    kind = node.get("type")
    if kind in ("integer", "number"):
        return f"{'an integer' if kind == 'integer' else 'a number'}{_range(node)}"
    if kind == "object":
        keys = ", ".join(node.get("properties", ()))
        return f"a mapping with the keys {keys}" if keys else "a mapping"
    if kind == "array":
        items = _words(node["items"]) if "type" in node.get("items", {}) else "anything"
        return f"a list (each of them {items})"
    return {"string": "a text", "boolean": "true or false", "null": "null"}.get(str(kind), "anything")


def _range(node: Node) -> str:
    bounds = [
        f"{word} {node[key]}"
        for key, word in (
            ("minimum", "of at least"),
            ("exclusiveMinimum", "above"),
            ("maximum", "at most"),
            ("exclusiveMaximum", "below"),
        )
        if key in node
    ]
    return f" {' and '.join(bounds)}" if bounds else ""
