"""`SchemaTree`: paths of a model and the words for what may stand there."""

from __future__ import annotations

import pytest
from enginebay.config import EngineConfig
from enginebay.config.tree import Path, SchemaTree, dotted, tree_of
from pydantic import BaseModel


class Inner(BaseModel):
    flag: bool = True


class Outer(BaseModel):
    inner: Inner = Inner()
    choice: int | Inner = 0
    free: dict[str, object] = {}
    numbers: dict[str, int] = {}
    items: list[Inner] = []


TREE = SchemaTree(Outer)


def test_dotted() -> None:
    assert dotted(("a", 0, "b")) == "a.0.b"


def test_leaves_hold_words_and_what_lies_below_them() -> None:
    assert [dotted(p) for p in TREE.leaves()] == [
        "inner.flag",
        "choice",
        "choice.flag",
        "free",
        "numbers",
        "items",
    ]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (("inner",), "a mapping with the keys flag"),
        (("inner", "flag"), "true or false"),
        (("choice",), "an integer or a mapping with the keys flag"),
        (("free",), "a mapping"),
        (("free", "x", "y"), "anything"),
        (("numbers", "x"), "an integer"),
        (("items", 3, "flag"), "true or false"),
    ],
)
def test_expected(path: Path, words: str) -> None:
    assert TREE.expected(path) == words


@pytest.mark.parametrize("path", [("nope",), ("inner", "nope"), ("inner", "flag", "x"), ("inner", 0)])
def test_no_such_path(path: Path) -> None:
    assert TREE.at(path) == []


def test_accepts_tells_booleans_from_integers() -> None:
    assert TREE.accepts(("inner", "flag"), True)
    assert not TREE.accepts(("inner", "flag"), 1)
    assert not TREE.accepts(("numbers", "x"), True)
    assert TREE.accepts(("free", "x"), None)


def test_sections() -> None:
    assert TREE.is_section(("inner",))
    assert not TREE.is_section(("choice",))
    assert not TREE.is_section(("nope",))


def test_every_default_is_of_a_type_that_its_path_accepts() -> None:
    tree = tree_of(EngineConfig)
    values = EngineConfig().model_dump()
    for path in tree.leaves():
        value = values
        for key in path:
            value = value.get(str(key)) if isinstance(value, dict) else None  # type: ignore[assignment]
        if value is not None:
            assert tree.accepts(path, value), dotted(path)
