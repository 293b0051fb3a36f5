"""The exception tree. Every error that a user can cause derives from `EngineBayError`.

::

    EngineBayError
    ├── ConfigError              the configuration tree: unknown key, wrong type, value out of range
    ├── PluginError              a plugin as such: broken import, wrong record, wrong API version
    │   ├── PluginNotFoundError      nothing installed has that name
    │   ├── PluginConflictError      two distributions claim one name
    │   └── PluginMismatchError      parent and worker processes loaded different plugins
    ├── ResolutionError          no candidate for a bay meets the requirements, or a named one does not
    ├── ModelError               the model reference: not found, no tokenizer, terms not accepted
    │   └── WeightsError             a checkpoint's tensors: missing, extra, misshapen, truncated
    ├── MemoryBudgetError        what was asked does not fit the device; carries the numbers
    ├── RequestError             one request is wrong; the engine serves on
    │   └── RequestTooLargeError     it could never fit max_model_len or the KV pool
    ├── EngineDeadError          the engine stopped; every waiting client gets this
    └── ExecutorError            a worker failed; carries the rank

A message says what happened, where (plugin and distribution, YAML path, request id), and what to do.
"""

from __future__ import annotations


class EngineBayError(Exception):
    """Base of every error raised on purpose by enginebay."""


class ConfigError(EngineBayError, ValueError):
    """The configuration is wrong; the message names the path and, where one is near, the right key."""


class PluginError(EngineBayError):
    """A plugin could not be used as it is."""


class PluginNotFoundError(PluginError, LookupError):
    """No installed plugin has the requested name; the message lists what was found and where."""


class PluginConflictError(PluginError):
    """Two distributions claim the same name in the same bay."""


class PluginMismatchError(PluginError):
    """A process loaded another plugin, or another version of it, than the parent resolved."""


class ResolutionError(EngineBayError):
    """A bay cannot be filled; the message lists each candidate with its reasons."""


class ModelError(EngineBayError):
    """The model reference cannot be turned into a configuration, a tokenizer and weights."""


class WeightsError(ModelError):
    """A checkpoint does not hold exactly the tensors that the model declares."""


class MemoryBudgetError(EngineBayError):
    """What was asked does not fit the device's memory; the message holds the numbers in bytes."""


class RequestError(EngineBayError, ValueError):
    """One request is invalid. The engine keeps serving the others."""


class RequestTooLargeError(RequestError):
    """The request could never run: it exceeds max_model_len or the whole KV pool."""


class ExecutorError(EngineBayError):
    """A worker raised or died."""


class EngineDeadError(EngineBayError):
    """The engine stopped and takes no more requests."""
