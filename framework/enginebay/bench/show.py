"""Tables on standard output and the bar on standard error. It computes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from enginebay.bench.measure import Progress as Report

#: rows of rates: key of the figures -> what is shown
_RATES = {
    "requests_per_s": "requests/s",
    "input_tokens_per_s": "input tok/s",
    "output_tokens_per_s": "output tok/s",
    "total_tokens_per_s": "total tok/s",
}
_TIMES = {"batch_ms": "whole batch, ms", "ttft_ms": "first token (TTFT), ms", "inter_token_ms": "inter-token, ms"}
_COLUMNS = ("p50", "p90", "p99", "mean", "max")


@contextlib.contextmanager
def bar(engine: str, total: int) -> Iterator[Report]:
    """A bar on standard error, gone when it is over; yields what moves it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(engine, total=total)
        yield lambda what, done: progress.update(task, description=f"{engine}: {what}", completed=done)


def print_document(data: dict[str, Any]) -> None:
    """Show a document of `enginebay.bench.document`."""
    console = Console(highlight=False)
    console.print(_title(data))
    if data["command"] == "startup":
        console.print(_startup_table(data["figures"]))
        return
    figures = data["figures"]
    rates = _table("", "median run")
    for key, label in _RATES.items():
        if key in figures:
            rates.add_row(label, f"{figures[key]:,.2f}")
    if figures["peak_memory_bytes"] is not None:
        rates.add_row("peak memory, GB", f"{figures['peak_memory_bytes'] / 1e9:.2f}")
    console.print(rates)
    times = _table("", *_COLUMNS)
    for key, label in _TIMES.items():
        if figures.get(key) is not None:
            times.add_row(label, *(f"{figures[key][column]:,.2f}" for column in _COLUMNS))
    console.print(times)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Show rows whose first cell is a name, in as many lines of the terminal as they need."""
    table = _table("", *columns)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


def _title(data: dict[str, Any]) -> str:
    engine, versions = data["engine"]["name"], data["versions"]
    version = next((versions[n] for n in (engine, f"{engine}-python", f"{engine}-cpu") if n in versions), "")
    work = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in data["workload"].items())
    return f"[bold]{data['command']}[/bold] of {engine} {version} on {data['hardware']['cpu']}: {work}"


def _startup_table(figures: dict[str, Any]) -> Table:
    table = _table("start, seconds", *figures)
    for name in figures["cold"]["parts_s"]:
        table.add_row(name.replace("_", " "), *(f"{kind['parts_s'][name]:.3f}" for kind in figures.values()))
    table.add_row("total", *(f"{kind['total_s']:.3f}" for kind in figures.values()), style="bold")
    return table


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table
