"""Checks on one plugin object: its hooks, then the records that they return.

Every fault becomes a `PluginError` that names the plugin; one whose hooks fail the check does not stay registered.
Where the object came from is not known here: the caller says it (`where`).
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pluggy

from enginebay import __version__
from enginebay.errors import PluginError
from enginebay.plugins import hookspecs
from enginebay.plugins.hookspecs import PROVISION_HOOKS
from enginebay.plugins.records import API_VERSION, RECORD_TYPES, Kind, Record
from enginebay.plugins.selection import AUTO
from enginebay.plugins.suggest import did_you_mean

#: every hook that a plugin may implement
HOOKS = tuple(name for name in vars(hookspecs) if name.startswith("enginebay_"))


def register(manager: pluggy.PluginManager, plugin: Any, name: str, where: str) -> str:
    """Register a plugin object under `name` unless it is, check its hooks, and return its name in the manager."""
    if (registered := manager.get_name(plugin)) is not None:
        return registered
    try:
        manager.register(plugin, name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        unknown = _unknown_hooks(manager, plugin)
        if manager.is_registered(plugin):
            manager.unregister(plugin)
        if unknown:
            hints = "; ".join(f"{hook!r} is not a hook of enginebay.{did_you_mean(hook, HOOKS)}" for hook in unknown)
            raise PluginError(f"{where}: {hints}") from error
        raise PluginError(f"{where}: {error}") from error
    if not manager.get_hookcallers(plugin):
        manager.unregister(plugin)
        hint = _bare_function_hint(plugin) or f" Implement one of {', '.join(HOOKS)}, decorated with @hookimpl."
        raise PluginError(f"{where}: {name} implements no hook of enginebay.{hint}")
    return name


def provided(manager: pluggy.PluginManager, name: str, kind: str, where: str, *, required: bool) -> list[Record]:
    """What a registered plugin's provision hook of `kind` returns, checked to be that kind's records.

    Parameters
    ----------
    manager, name
        Where the plugin is registered, and as what.
    kind
        Whose hook is called.
    where
        The plugin's description for messages.
    required
        Whether it is a fault not to implement that hook.
    """
    hook_name = PROVISION_HOOKS[kind]
    plugin = manager.get_plugin(name)
    hook = manager.subset_hook_caller(hook_name, manager.get_plugins() - {plugin})
    if not hook.get_hookimpls():
        if required:
            raise PluginError(f"{where}: {name} does not implement {hook_name}.{_bare_function_hint(plugin)}")
        return []
    expected = RECORD_TYPES[_kind(kind)]
    try:
        parts = hook()
        if single := [part for part in parts if isinstance(part, expected)]:
            raise PluginError(
                f"{where}: {hook_name} must return a list of {expected.__name__} objects; put {single[0].name!r} in []"
            )
        items = [item for part in parts for item in part]
    except PluginError:
        raise
    except Exception as error:  # the plugin's own code may raise anything
        raise PluginError(f"{where}: {hook_name} failed: {explain(error)}") from error
    names: set[str] = set()
    for item in items:
        if not isinstance(item, expected):
            raise PluginError(f"{where}: {hook_name} must return {expected.__name__} objects, not {item!r}")
        _check_fields(item, f"{where}: {hook_name}")
        if item.name in names:
            raise PluginError(f"{where}: {hook_name} returns two records named {item.name!r}")
        names.add(item.name)
    return items


def check_api_version(record: Record, kind: str, where: str) -> None:
    """Refuse a record written for another version of its kind's contract."""
    host = API_VERSION[_kind(kind)]
    if record.api_version != host:
        side = "enginebay" if record.api_version > host else "the plugin"
        raise PluginError(
            f"{where} needs {kind} API {record.api_version}, this host has {host} (enginebay {__version__}). "
            f"Install a newer version of {side}."
        )


def explain(error: BaseException) -> str:
    """An exception in one line, with the place that raised it, and what an import error of ours hints at."""
    # importlib's own frames and ours in this package say nothing to the plugin's author
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if "importlib" not in f.filename and Path(f.filename).parent != Path(__file__).parent]
    place = f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""
    text = f"{type(error).__name__}: {error}{place}"
    if isinstance(error, ImportError) and (error.name or "").split(".")[0] == "enginebay":
        text += f". It was written for another version of enginebay; this host is {__version__}, API {API_VERSION}"
    if isinstance(error, TypeError) and "__init__()" in str(error):
        text += f". If a record's field is meant, it was written for another API than this host's {API_VERSION}"
    return text


def _check_fields(record: Record, where: str) -> None:
    """Refuse what could be registered and then never be asked for, or fail only when an engine starts."""
    name: Any = record.name
    if not isinstance(name, str) or not name or name == AUTO or any(c.isspace() or c == ":" for c in name):
        raise PluginError(
            f"{where} returns a record named {name!r}: a name is a text without spaces and colons, and {AUTO!r} is the "
            "host's word for its own choice; name it otherwise"
        )
    if not callable(record.factory):
        raise PluginError(
            f"{where}: the factory of {name!r} is {record.factory!r}; give a function or class that the host can call"
        )


def _kind(kind: str) -> Kind:
    return next(k for k in RECORD_TYPES if k == kind)


def _unknown_hooks(manager: pluggy.PluginManager, plugin: Any) -> list[str]:
    names = []
    for attribute in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, attribute)
        if options is not None and not options.get("optionalhook"):
            name = options.get("specname") or attribute
            if name not in HOOKS:
                names.append(name)
    return names


def _bare_function_hint(plugin: Any) -> str:
    bare = [name for name in dir(plugin) if name in HOOKS and callable(getattr(plugin, name))]
    return f" {bare[0]} is there, but lacks the @hookimpl decorator." if bare else ""
