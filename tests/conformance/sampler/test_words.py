"""What the suite says to a processor, from the models of its record."""

from __future__ import annotations

from typing import Any

from enginebay.conformance.sampler.words import accepted, examples, fields_of, probes, spelt, unexampled
from enginebay.plugins.records import NoOptions
from pydantic import BaseModel, ConfigDict, Field


class Words(BaseModel):
    model_config = ConfigDict(extra="forbid")

    level: int = Field(ge=0, examples=[1, 2, 3])
    on: bool = False
    name: str = Field("x", alias="as", examples=["x", "y"])
    lone: float = 0.5


def test_one_word_changes_at_a_time() -> None:
    first = {"level": 1, "on": True, "as": "x"}
    assert examples(Words) == [
        first,
        *(first | one for one in ({"level": 2}, {"level": 3}, {"on": False}, {"as": "y"})),
    ]
    assert fields_of(Words) == ["level", "on", "as", "lone"]
    assert all(accepted(Words, said) for said in examples(Words))


def test_a_model_without_words_has_one_example() -> None:
    assert examples(NoOptions) == [{}]
    assert unexampled(NoOptions) == []


def test_examples_of_the_whole_model_count() -> None:
    class Pair(BaseModel):
        model_config = ConfigDict(json_schema_extra={"examples": [{"low": 1, "high": 2}, {"low": 0, "high": 9}]})

        low: int
        high: int

    assert examples(Pair) == [{"low": 1, "high": 2}, {"low": 0, "high": 9}]
    assert unexampled(Pair) == []


def test_what_must_be_said_needs_an_example() -> None:
    class Lacking(Words):
        more: int
        flag: bool

    assert unexampled(Lacking) == ["more"]  # a flag has two values


def test_probes_change_one_word_and_some_are_refused() -> None:
    first = examples(Words)[0]
    verdicts: dict[str, set[bool]] = {}
    for word, said in probes(Words):
        assert {w: v for w, v in said.items() if w != word} == {w: v for w, v in first.items() if w != word}
        verdicts.setdefault(word, set()).add(accepted(Words, said))
    assert verdicts == {word: {True, False} for word in ("level", "on", "as", "lone")}


def test_words_are_spelt_for_people() -> None:
    said: dict[str, Any] = {"n": 2, "text": "a" * 60}
    assert spelt(said).startswith("n=2, text='aaa")
    assert (spelt({}), spelt(None)) == ("said without a word", "nothing said")
