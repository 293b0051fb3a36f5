"""Calling a chosen record's factory: what it raises or returns wrongly is the plugin's fault, and is said by its name.

It knows no bay; the caller says what the factory must return.
"""

from __future__ import annotations

from typing import Any, TypeVar

from enginebay.errors import EngineBayError, PluginError
from enginebay.plugins.registration import explain
from enginebay.plugins.selection import Selection

Made = TypeVar("Made")


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
    try:
        made = record.factory(context)
    except EngineBayError:
        raise
    except Exception as error:  # the plugin's own code may raise anything
        raise PluginError(f"{where}: its factory failed: {explain(error)}; correct it, or choose another") from error
    if not isinstance(made, expected):
        raise PluginError(f"{where}: its factory must return a {expected.__name__}, not {made!r}")
    return made
