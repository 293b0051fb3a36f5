"""Messages, and the check of a plugin's own options."""

from __future__ import annotations

import pytest
from enginebay.config import load_config, validate_options
from enginebay.config.problems import config_error, show
from enginebay.errors import ConfigError
from pydantic import BaseModel, ConfigDict, Field, field_validator


class Limits(BaseModel):
    rows: int = Field(default=1, ge=1)


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    kv_splits: int = Field(default=1, ge=1)
    limits: Limits = Limits()
    even: int = 0

    @field_validator("even")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("must be even")
        return value


def test_valid_options_come_back_as_the_plugins_model() -> None:
    assert validate_options(Options, {"kv_splits": 4}, "attention.options") == Options(kv_splits=4)


def test_every_fault_is_named_with_its_path_and_place() -> None:
    loaded = load_config(None, ["attention.options={kv_split: 4, limits: {rows: 0}, even: 3}"], env={})
    with pytest.raises(ConfigError) as error:
        validate_options(Options, loaded.config.attention.options, "attention.options", loaded.where)
    place = "(--set attention.options={kv_split: 4, limits: {rows: 0}, even: 3})"
    assert str(error.value).split("\n  ") == [
        "3 errors in the configuration:",
        f"attention.options.limits.rows {place}: expected an integer of at least 1, got 0",
        f"attention.options.even {place}: must be even",
        f"attention.options.kv_split {place}: unknown key; did you mean kv_splits?",
    ]


def test_without_sources_the_path_stands_alone() -> None:
    with pytest.raises(ConfigError) as error:
        validate_options(Options, {"kv_splits": "4"}, "attention.options")
    assert str(error.value) == 'attention.options.kv_splits: expected an integer of at least 1, got the text "4"'


def test_one_fault_is_one_line_and_repeats_are_dropped() -> None:
    assert str(config_error(["a: b", "a: b"])) == "a: b"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (True, "true"), ("x", 'the text "x"'), ([1], "[1]"), ({1}, '"{1}"')],
)
def test_values_read_as_in_yaml(value: object, text: str) -> None:
    assert show(value) == text
