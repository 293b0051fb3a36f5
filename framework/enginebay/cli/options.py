"""What commands that take an engine configuration share: the file argument and ``--set``. It starts no engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a click command ``[ENGINE_YAML]`` and ``--set PATH=VALUE``, and call it with ``loaded``.

    The decorated function receives one keyword argument for them, ``loaded: enginebay.config.LoadedConfig``, with the
    file, the environment and the command line already merged and checked::

        @click.command()
        @engine_options
        @click.option("--prompt")
        def run(loaded: LoadedConfig, prompt: str | None) -> None: ...

    A wrong configuration raises `ConfigError`, which the command group prints without a traceback.
    """

    @click.argument("engine_yaml", required=False, type=click.Path())
    @click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="PATH=VALUE",
        help="Set one value over the file and the environment, e.g. --set scheduler.max_num_seqs=8. May be repeated.",
    )
    @functools.wraps(command)
    def wrapper(*args: Any, engine_yaml: str | None, overrides: tuple[str, ...], **kwargs: Any) -> Any:
        from enginebay.config import load_config

        return command(*args, loaded=load_config(engine_yaml, overrides), **kwargs)

    return wrapper
