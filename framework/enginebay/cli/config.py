"""``enginebay config``: the effective configuration with its sources, and the JSON schema. It starts no engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import click
import yaml
from pydantic import BaseModel

from enginebay.cli.options import engine_options
from enginebay.config import LoadedConfig, json_schema


@click.group()
def config() -> None:
    """Show the effective configuration, or its JSON schema."""


@config.command()
@engine_options
def show(loaded: LoadedConfig) -> None:
    """Print the effective configuration as YAML, each value with its source.

    The output is itself a valid engine.yaml.
    """
    lines = list(_lines(loaded.config.model_dump(mode="json"), loaded, "", 0))
    width = min(max(len(text) for text, _ in lines), 60)
    for text, source in lines:
        click.echo(f"{text.ljust(width)}  # {source}" if source else text)


@config.command()
def schema() -> None:
    """Print the JSON schema of engine.yaml, with the options of every installed plugin.

    A plugin that cannot be loaded is named on stderr and left out.
    """
    click.echo(json.dumps(json_schema(installed_options()), indent=2, ensure_ascii=False))


def installed_options() -> dict[tuple[str, str], type[BaseModel]]:
    """``(kind, name) -> option model`` of every installed plugin; broken ones are reported on stderr."""
    from enginebay.plugins.loader import PluginLoader
    from enginebay.plugins.records import KINDS

    loader = PluginLoader()
    models: dict[tuple[str, str], type[BaseModel]] = {}
    for kind in KINDS:
        loaded, broken = loader.candidates(kind)
        models.update({(kind, plugin.record.name): plugin.record.options for plugin in loaded})
        for plugin in broken:
            click.echo(f"left out: {plugin.error}", err=True)
    return models


def _lines(values: Mapping[str, Any], loaded: LoadedConfig, path: str, depth: int) -> Iterator[tuple[str, str]]:
    """YAML lines of a mapping, each with its source; a section's own line has none."""
    for key, value in values.items():
        below = f"{path}.{key}" if path else key
        head = f"{'  ' * depth}{_scalar(key)}:"
        if isinstance(value, Mapping) and value:
            yield head, ""
            yield from _lines(value, loaded, below, depth + 1)
        else:
            yield f"{head} {_scalar(value)}", " ".join(loaded.where(below).split())


def _scalar(value: Any) -> str:
    """A value on one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    text = text.removesuffix("\n").removesuffix("\n...")
    return json.dumps(value) if "\n" in text else text
