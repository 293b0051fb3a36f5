"""Options of a plugin that notice which of them are read."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

#: looking at one of these is looking at all options
_WHOLE = frozenset({"__dict__", "__iter__", "model_dump", "model_dump_json", "model_copy", "copy", "dict"})


def watched(model: type[BaseModel]) -> tuple[BaseModel, set[str]]:
    """The options of `model` at their defaults, and the names of those that were read, which fills as they are."""
    read: set[str] = set()
    names = frozenset(model.model_fields)

    class Watched(model):  # type: ignore[valid-type, misc]
        """The same, watched."""

        def __getattribute__(self, name: str) -> Any:
            if name in names:
                read.add(name)
            elif name in _WHOLE:
                read.update(names)
            return super().__getattribute__(name)

    made = Watched()
    read.clear()
    return made, read
