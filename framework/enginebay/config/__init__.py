"""Configuration: YAML, environment, command line and Python arguments become one frozen, checked `EngineConfig`.

`schema` says what may be written, `sources` reads it into `values`, `load` merges and checks them and keeps where each
came from, `resolved` holds what "auto" became. The package knows no plugin, model or hardware, and imports no torch.
"""

from __future__ import annotations

from enginebay.config.export import json_schema
from enginebay.config.load import LoadedConfig, load_config
from enginebay.config.problems import validate_options
from enginebay.config.resolved import ResolvedConfig
from enginebay.config.schema import (
    AUTO_BATCHED_TOKENS,
    AttentionConfig,
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    GraphsConfig,
    GroupBackends,
    ParallelConfig,
    PhaseBackends,
    PhaseOverrides,
    QuantConfig,
    SchedulerConfig,
)
from enginebay.config.values import Source

__all__ = [
    "AUTO_BATCHED_TOKENS",
    "AttentionConfig",
    "CacheConfig",
    "EngineConfig",
    "ExecutorConfig",
    "GraphsConfig",
    "GroupBackends",
    "LoadedConfig",
    "ParallelConfig",
    "PhaseBackends",
    "PhaseOverrides",
    "QuantConfig",
    "ResolvedConfig",
    "SchedulerConfig",
    "Source",
    "json_schema",
    "load_config",
    "validate_options",
]
