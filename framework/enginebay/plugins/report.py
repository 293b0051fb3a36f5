"""The report: which plugin fills each bay, who chose it, what was rejected and why, and what was switched off.

It shows selections as a table, as plain text, or as data. It decides nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from enginebay.plugins.selection import Rejected, Selection, switched_off


def report_dict(selections: Iterable[Selection]) -> dict[str, Any]:
    """The report as plain data, ready for JSON."""
    selections = list(selections)
    return {
        "bays": [
            {
                "bay": s.bay,
                "kind": s.kind,
                "label": s.label,
                "wanted": s.wanted,
                "source": s.source,
                "chosen": None if s.chosen is None else s.chosen.name,
                "summary": None if s.chosen is None else s.chosen.summary,
                "plugin": None if s.identity is None else asdict(s.identity),
                "note": s.note,
                "rejected": [
                    {"name": r.name, "origin": r.origin, "reasons": [asdict(reason) for reason in r.reasons]}
                    for r in s.rejected
                ],
            }
            for s in selections
        ],
        "switched_off": [asdict(off) for off in switched_off(selections)],
    }


def report_text(selections: Iterable[Selection]) -> str:
    """The report as plain text, one line a bay and one a rejected candidate's reason."""
    selections = list(selections)
    rows = [(s.bay, _name(s), _origin(s), _how(s)) for s in selections]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    lines: list[str] = []
    for row, selection in zip(rows, selections, strict=True):
        lines.append("  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]).rstrip())
        lines += [f"    not {line}" for rejected in selection.rejected for line in _rejected_lines(rejected)]
    lines += [f"switched off: {off.feature}, by {off.by}: {off.why}" for off in switched_off(selections)]
    return "\n".join(lines)


def print_report(selections: Sequence[Selection], file: TextIO | None = None) -> None:
    """Print the report: a table on a terminal, else plain text. `file` None: standard error."""
    out = sys.stderr if file is None else file
    if not out.isatty():
        out.write(report_text(selections) + "\n")
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("bay", "plugin", "from", "chosen by", "not chosen", title="Parts of this engine")
    for s in selections:
        rejected = "\n".join(line for r in s.rejected for line in _rejected_lines(r))
        table.add_row(*(escape(cell) for cell in (s.bay, _name(s), _origin(s), _how(s), rejected)))
    console = Console(file=out)
    console.print(table)
    for off in switched_off(selections):
        console.print(f"[bold yellow]switched off:[/] {escape(f'{off.feature}, by {off.by}: {off.why}')}")


def _name(selection: Selection) -> str:
    return "-" if selection.chosen is None else selection.chosen.name


def _origin(selection: Selection) -> str:
    return selection.note if selection.identity is None else selection.identity.origin


def _how(selection: Selection) -> str:
    return f"({selection.source})"


def _rejected_lines(rejected: Rejected) -> list[str]:
    # A reason may carry several lines (a clash lists its claimants); they stay on one here.
    return [f"{rejected.name}: {' '.join(str(reason).split())}" for reason in rejected.reasons]
