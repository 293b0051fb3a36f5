"""What a request, or YAML, may say to a logits processor: from the examples and the types of a pydantic model.

Examples stand in ``Field(examples=[...])``, or for the whole model in ``json_schema_extra={"examples": [...]}``. It knows no
processor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

Words = Mapping[str, Any]

#: values that an author may not have thought of; of these a model accepts some and refuses the others
PROBES: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 1000, 2**31, 2**70, -(2**63)),
    *(-1.0, 0.0, 1e-30, 0.5, 1e30, -1e30, math.inf, -math.inf, math.nan),
    *("", "x", "1", "no", True, False, None),
    *([], [0], [-1], [2**40], [0, 0], ["x"], {}, {"0": 1}, {0: 1.0}, {-1: 1}, {2**40: 1e30}, [[]], [[0, 1]]),
)


def fields_of(model: type[BaseModel]) -> list[str]:
    """The words that a model knows, as they are written."""
    return [field.alias or name for name, field in model.model_fields.items()]


def unexampled(model: type[BaseModel]) -> list[str]:
    """Words that must be said and have no example."""
    if _whole(model):
        return []
    return [
        field.alias or name
        for name, field in model.model_fields.items()
        if field.is_required() and not field.examples and field.annotation is not bool
    ]


def examples(model: type[BaseModel]) -> list[dict[str, Any]]:
    """Things to say: with the first example of every word, and with each further example of one word."""
    values: dict[str, list[Any]] = {}
    for name, field in model.model_fields.items():
        given = list(field.examples or ([True, False] if field.annotation is bool else []))
        if given:
            values[field.alias or name] = given
    first = {word: given[0] for word, given in values.items()}
    single = [first | {word: value} for word, given in values.items() for value in given[1:]]
    return [*_whole(model), *([first] if first or not model.model_fields else []), *single] or [{}]


def accepted(model: type[BaseModel], said: Words) -> bool:
    """Whether the model takes it; an error that is no `ValidationError` is passed on."""
    try:
        model.model_validate(dict(said))
    except ValidationError:
        return False
    return True


def probes(model: type[BaseModel]) -> list[tuple[str, dict[str, Any]]]:
    """The first example with one word, which is named, changed to each of `PROBES`."""
    first = examples(model)[0]
    return [(word, first | {word: value}) for word in fields_of(model) for value in PROBES]


def spelt(said: Words | None) -> str:
    """For people."""
    if said is None:
        return "nothing said"
    return ", ".join(f"{word}={value!r:.40}" for word, value in said.items()) or "said without a word"


def _whole(model: type[BaseModel]) -> list[dict[str, Any]]:
    extra: Any = model.model_config.get("json_schema_extra")
    return [dict(said) for said in extra.get("examples", ())] if isinstance(extra, dict) else []
