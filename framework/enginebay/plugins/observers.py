"""Observers: the plugins that listen to the engine, with a flag a hook so that silence costs nothing.

It passes objects on; it does not know what an engine, a step or a request is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import pluggy

logger = logging.getLogger(__name__)


class Observers:
    """The observation hooks of a fixed set of registered plugins, called in order of their names.

    An observer that raises is reported once, by name, and not called again for that hook: it must not end a run.
    """

    def __init__(self, manager: pluggy.PluginManager, plugin_names: Iterable[str]) -> None:
        self._manager = manager
        self._names = sorted(plugin_names)
        self._engine_started = self._callers("enginebay_engine_started")
        self._step_finished = self._callers("enginebay_step_finished")
        self._request_finished = self._callers("enginebay_request_finished")
        self._engine_stopped = self._callers("enginebay_engine_stopped")

    @property
    def wants_engine_started(self) -> bool:
        """Whether anybody listens to `engine_started`."""
        return bool(self._engine_started)

    @property
    def wants_step_finished(self) -> bool:
        """Whether anybody listens to `step_finished`; if not, no StepInfo need be made."""
        return bool(self._step_finished)

    @property
    def wants_request_finished(self) -> bool:
        """Whether anybody listens to `request_finished`."""
        return bool(self._request_finished)

    @property
    def wants_engine_stopped(self) -> bool:
        """Whether anybody listens to `engine_stopped`."""
        return bool(self._engine_stopped)

    def engine_started(self, engine: Any) -> None:
        """Tell them that the engine is ready."""
        _notify(self._engine_started, engine=engine)

    def step_finished(self, step: Any) -> None:
        """Tell them that a step retired."""
        _notify(self._step_finished, step=step)

    def request_finished(self, request: Any) -> None:
        """Tell them that a request ended."""
        _notify(self._request_finished, request=request)

    def engine_stopped(self, engine: Any) -> None:
        """Tell them that the engine stopped."""
        _notify(self._engine_stopped, engine=engine)

    def _callers(self, hook: str) -> dict[str, pluggy.HookCaller]:
        everybody = self._manager.get_plugins()
        callers = {
            name: self._manager.subset_hook_caller(hook, everybody - {self._manager.get_plugin(name)})
            for name in self._names
        }
        return {name: caller for name, caller in callers.items() if caller.get_hookimpls()}


def _notify(callers: dict[str, pluggy.HookCaller], **arguments: Any) -> None:
    for name, caller in list(callers.items()):
        try:
            caller(**arguments)
        except Exception:  # an observer may raise anything, and none of it may end the run
            logger.exception("observer %s failed in %s and is switched off for it", name, caller.name)
            del callers[name]
