"""Calling a plugin's code, a chosen record's factory first of all: what it raises or returns wrongly is said by its name.

It knows no bay; the caller says what the factory must return.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from enginebay.errors import EngineBayError, PluginError
from enginebay.plugins.records import Record
from enginebay.plugins.registration import explain
from enginebay.plugins.selection import Selection

Made = TypeVar("Made")
Result = TypeVar("Result")


def make(selection: Selection, context: Any, expected: type[Made]) -> Made:
    """What the factory of `selection`'s record makes of `context`, checked to be an `expected`.

    Raises
    ------
    PluginError
        The factory raised, or returned something else. An error of ours that it raises is passed on as it is.
    """
    record, identity = selection.chosen, selection.identity
    assert record is not None
    where = f"{record.kind}:{record.name}" + (f" ({identity.origin})" if identity else "")
    return made_by(record, context, expected, where, "choose another")


def made_by(record: Record, context: Any, expected: type[Made], where: str, otherwise: str) -> Made:
    """The same for a record without a selection: `where` names the plugin, `otherwise` says what helps besides mending it."""
    made = called(lambda: record.factory(context), where, "its factory", otherwise)
    if not isinstance(made, expected):
        raise PluginError(f"{where}: its factory must return a {expected.__name__}, not {made!r}")
    return made


def called(function: Callable[[], Result], where: str, what: str, otherwise: str) -> Result:
    """What `function`, a plugin's own code, returns; what it raises is a `PluginError`, errors of ours apart."""
    try:
        return function()
    except EngineBayError:
        raise
    except Exception as error:  # the plugin's own code may raise anything
        raise PluginError(f"{where}: {what} failed: {explain(error)}; correct it, or {otherwise}") from error
