"""Values with their sources: the tree that every source is read into, and how two of them merge.

A tree is nested dictionaries whose leaves are `Given`: a value and its `Source`. It knows no schema and reads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Union

from enginebay.config.tree import Path

SourceKind = Literal["cli", "python", "env", "yaml", "default"]


@dataclass(frozen=True)
class Source:
    """Where one value was written."""

    kind: SourceKind
    #: ``engine.yaml:7``, ``ENGINEBAY_DTYPE`` or ``--set dtype=float32``; empty for python and default
    detail: str = ""

    def __str__(self) -> str:
        return self.detail or {"python": "Python argument"}.get(self.kind, self.kind)


@dataclass(frozen=True)
class Given:
    """A value that somebody wrote; None and false are values too."""

    value: Any
    source: Source


Tree = dict[str, Union["Tree", Given]]


def merge(base: Tree, over: Tree, path: Path = ()) -> Tree:
    """`base` with everything that `over` gives put over it, key by key; a given false, 0 or null holds (C1, C3).

    One attention backend stands for both phases, so a source that overrides one phase leaves it to the other.
    """
    out = dict(base)
    for key, value in over.items():
        below = (*path, key)
        old = out.get(key)
        if _is_backend(below) and isinstance(old, Given) and isinstance(value, dict):
            old = {"prefill": old, "decode": old}
        out[key] = merge(old, value, below) if isinstance(old, dict) and isinstance(value, dict) else value
    return out


def _is_backend(path: Path) -> bool:
    groups = ("attention", "backend", "groups")
    return path == groups[:2] or (path[:3] == groups and len(path) == 4)


def plain(tree: Tree) -> dict[str, Any]:
    """The tree's values alone."""
    return {key: plain(value) if isinstance(value, dict) else value.value for key, value in tree.items()}


def find_source(tree: Tree, path: Path) -> Source | None:
    """Source of the value at `path`, of what holds it, or of the first value below it; None where nobody gave any."""
    node: Tree | Given = tree
    for key in path:
        if isinstance(node, Given):
            return node.source
        if key not in node:
            return None
        node = node[str(key)]
    while isinstance(node, dict) and node:
        node = next(iter(node.values()))
    return node.source if isinstance(node, Given) else None
