"""``enginebay explain``: which part would fill each bay, and why, and where every setting comes from.

No model is loaded and no engine started. The command shows what the assembly found; it decides nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from enginebay.cli.options import engine_options

if TYPE_CHECKING:
    from enginebay.config import LoadedConfig, ResolvedConfig


@click.command()
@engine_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain(loaded: LoadedConfig, as_json: bool) -> None:
    """Show which part fills each bay, and why, without loading a model."""
    from enginebay.engine.explanation import explain as resolve_everything
    from enginebay.plugins.report import print_report, report_dict

    explanation = resolve_everything(loaded)
    if as_json:
        data = {
            "config": loaded.config.model_dump(mode="json"),
            "sources": {path: str(source) for path, source in loaded.sources.items()},
            "resolved": _plain(explanation.resolved),
            **report_dict(explanation.selections),
        }
        click.echo(json.dumps(data, indent=2, ensure_ascii=False))
        return
    print_report(explanation.selections, sys.stdout)
    click.echo("\nfound on this machine and in the model:")
    _echo_rows(_resolved_rows(explanation.resolved))
    click.echo("\nsettings and where they come from:")
    _echo_rows(_setting_rows(loaded))


def _resolved_rows(resolved: ResolvedConfig) -> list[tuple[str, str, str]]:
    """Name, value, and the sentence that says where it comes from."""
    values = _plain(resolved)
    return [(name, _show(value), resolved.why.get(name, "")) for name, value in values.items() if name != "why"]


def _setting_rows(loaded: LoadedConfig) -> list[tuple[str, str, str]]:
    """Dotted path, value and source of every setting."""
    values = loaded.config.model_dump(mode="json")
    return [(path, _show(_at(values, path)), str(source)) for path, source in loaded.sources.items()]


def _at(values: dict[str, Any], path: str) -> Any:
    """The value at a dotted path; a key may itself hold dots."""
    if path in values:
        return values[path]
    for key, below in values.items():
        if isinstance(below, dict) and path.startswith(f"{key}."):
            return _at(below, path.removeprefix(f"{key}."))
    raise KeyError(path)


def _plain(resolved: ResolvedConfig) -> dict[str, Any]:
    return {f.name: getattr(resolved, f.name) for f in fields(resolved)} | {"why": dict(resolved.why)}


def _show(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _echo_rows(rows: Sequence[tuple[str, str, str]]) -> None:
    """Print name, value and remark, the first two aligned."""
    names, values = (max((len(row[i]) for row in rows), default=0) for i in (0, 1))
    for name, value, remark in rows:
        click.echo(f"  {name.ljust(names)}  {value.ljust(min(values, 40))}  {remark}".rstrip())
