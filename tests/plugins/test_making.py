from __future__ import annotations

from typing import Any

import pytest
from enginebay.errors import ConfigError, PluginError
from enginebay.plugins.identity import PluginIdentity
from enginebay.plugins.making import make
from enginebay.plugins.records import SchedulerRecord
from enginebay.plugins.selection import Selection


def selection(factory: Any) -> Selection:
    return Selection(
        kind="scheduler",
        wanted="x",
        source="cli",
        chosen=SchedulerRecord(name="x", summary="s", factory=factory, api_version=0),
        identity=PluginIdentity("scheduler", "x", "acme", version="1.0"),
    )


def test_what_the_factory_makes_is_returned() -> None:
    assert make(selection(lambda context: context + 1), 4, int) == 5


def test_a_factory_that_raises_is_the_plugins_fault() -> None:
    with pytest.raises(
        PluginError, match=r"scheduler:x \(acme 1\.0\): its factory failed: ZeroDivisionError"
    ) as caught:
        make(selection(lambda context: 1 // context), 0, int)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_error_of_ours_is_passed_on() -> None:
    def refuse(context: Any) -> Any:
        raise ConfigError("scheduler.options.x: wrong")

    with pytest.raises(ConfigError, match=r"^scheduler\.options\.x: wrong$"):
        make(selection(refuse), None, int)


def test_a_factory_that_makes_something_else_is_named() -> None:
    with pytest.raises(PluginError, match=r"scheduler:x \(acme 1\.0\): its factory must return a int, not 'five'"):
        make(selection(lambda _: "five"), None, int)
