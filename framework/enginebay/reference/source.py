"""Reading Python source: what a module offers, without how it is done; and what stands above a class's fields.

It reads text and knows no kind. Nothing is imported, so comments count and a heavy library does not.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

_FOR_LINTERS = re.compile(r"  # (noqa|type: ignore).*")
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class FieldText:
    """A field of a dataclass as it is written."""

    name: str
    annotation: str
    #: source of the default; empty: it must be given
    default: str
    #: the ``#:`` comment above it
    text: str


@dataclass(frozen=True)
class ModuleText:
    """A module's source."""

    lines: list[str]
    tree: ast.Module

    @classmethod
    def of(cls, module: str) -> ModuleText:
        """Read a module of a package that is installed, without importing the module itself."""
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        text = Path(spec.origin).read_text(encoding="utf-8")
        return cls(text.splitlines(), ast.parse(text))

    @property
    def docstring(self) -> str:
        """The module's own text."""
        return ast.get_docstring(self.tree) or ""

    def stubs(self, names: Collection[str] = ()) -> list[str]:
        """Public classes and functions in their order, or those of `names`: signatures, fields and docstrings."""
        return [
            "\n".join(self._stub(node)).rstrip()
            for node in self.tree.body
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
            and (node.name in names if names else not node.name.startswith("_"))
        ]

    def fields(self, name: str) -> Iterator[FieldText]:
        """Public fields that the class `name` itself declares."""
        for node in self._class(name).body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                annotation = ast.unparse(node.annotation)
                if not node.target.id.startswith("_") and not annotation.startswith("ClassVar"):
                    yield FieldText(node.target.id, annotation, _default(node.value), self._comment(node.lineno))

    def _class(self, name: str) -> ast.ClassDef:
        return next(node for node in self.tree.body if isinstance(node, ast.ClassDef) and node.name == name)

    def _comment(self, lineno: int) -> str:
        """The ``#:`` lines that end right above a line."""
        found: list[str] = []
        for line in reversed(self.lines[: lineno - 1]):
            if not (text := line.strip()).startswith("#:"):
                break
            found.insert(0, text.removeprefix("#:").strip())
        return " ".join(found)

    def _stub(self, node: ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
        shown = {number: _FOR_LINTERS.sub("", self.lines[number - 1]) for number in range(_start(node), _end(node))}
        for function in (inner for inner in ast.walk(node) if isinstance(inner, Function)):
            documented = ast.get_docstring(function) is not None
            header = (function.returns or function).lineno  # every function here says what it returns
            if function is not node and function.name.startswith("_") and function.name != "__init__":
                hidden = range(_start(function) - 1, _end(function))  # with the blank line before it
            else:
                hidden = range(_end(function.body[0]) if documented else header + 1, _end(function))
                if not documented and header in shown:
                    shown[header] += " ..."
            for number in hidden:
                shown.pop(number, None)
        for number in sorted(shown):
            yield shown[number]


def _start(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The first line, decorators included."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _end(node: ast.stmt) -> int:
    """The line after the last."""
    return (node.end_lineno or node.lineno) + 1


def _default(value: ast.expr | None) -> str:
    """Source of a default; of a ``field(default_factory=dict)`` what it gives."""
    if value is None:
        return ""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in value.keywords}
        return given.get("default", f"{given['default_factory']}()" if "default_factory" in given else "")
    return ast.unparse(value)
