"""`load_config`: every source merged, checked once, and each value's origin kept.

Precedence: command line and Python > environment > YAML file > default. It looks at no hardware and loads no plugin.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from enginebay.config.problems import config_error, describe
from enginebay.config.schema import EngineConfig
from enginebay.config.sources import Layer, read_environment, read_python, read_settings, read_yaml
from enginebay.config.tree import Path, dotted, tree_of
from enginebay.config.values import Source, find_source, merge, plain

_DEFAULT = Source("default")


@dataclass(frozen=True)
class LoadedConfig:
    """A checked configuration and where each of its values was written."""

    config: EngineConfig
    #: dotted path of every leaf -> its source, e.g. ``"scheduler.max_num_seqs"``
    sources: Mapping[str, Source]

    def source(self, path: str) -> Source:
        """Source of `path`, or of the nearest path that holds it.

        ``attention.backend.decode`` has the source of ``attention.backend`` where one name was written for both phases.
        """
        while path:
            if path in self.sources:
                return self.sources[path]
            path = path.rpartition(".")[0]
        return _DEFAULT

    def where(self, path: str) -> str:
        """Where `path` was written, for messages: ``engine.yaml:7``."""
        return str(self.source(path))


def load_config(
    path: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """Merge a YAML file, the environment and overrides into a checked configuration.

    Parameters
    ----------
    path
        YAML file, or None.
    overrides
        A nested mapping from Python (``{"scheduler": {"max_num_seqs": 8}}``; None means "not given" except where null
        is allowed), or ``--set`` texts from a command line (``["scheduler.max_num_seqs=8"]``).
    env
        Environment to read ``ENGINEBAY_*`` from; the process's own if None.

    Raises
    ------
    ConfigError
        Every fault of every source at once, each with its path and place.
    """
    if isinstance(overrides, str):
        raise TypeError("overrides must be a mapping or a sequence of PATH=VALUE texts, not one text")
    schema = tree_of(EngineConfig)
    layers: list[Layer] = [] if path is None else [read_yaml(path, schema)]
    layers.append(read_environment(os.environ if env is None else env, schema))
    layers.append(
        read_python(overrides, schema) if isinstance(overrides, Mapping) else read_settings(overrides, schema)
    )
    problems = [problem for layer in layers for problem in layer.problems]
    tree = layers[0].tree
    for layer in layers[1:]:
        tree = merge(tree, layer.tree)

    def label(at: Path) -> str:
        source = find_source(tree, at) or find_source(tree, at[:-1])
        return f"{dotted(at)} ({source})" if source else dotted(at)

    data = plain(tree)
    try:
        config = EngineConfig.model_validate(data)
    except ValidationError as error:
        raise config_error([*problems, *describe(EngineConfig, data, error, label)]) from None
    if problems:
        raise config_error(problems)
    return LoadedConfig(
        config, {dotted(leaf): find_source(tree, leaf) or _DEFAULT for leaf in _leaves(config.model_dump(), ())}
    )


def _leaves(values: Mapping[str, Any], path: Path) -> list[Path]:
    """Paths of all values; an empty mapping is one."""
    out: list[Path] = []
    for key, value in values.items():
        below = (*path, key)
        out.extend(_leaves(value, below) if isinstance(value, Mapping) and value else [below])
    return out
