"""``enginebay plugins``: list, show, compare and check plugins.

``list`` reads metadata only: it imports no plugin and no torch, so a broken plugin cannot break it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from enginebay.errors import EngineBayError, PluginError
from enginebay.plugins.catalogue import Catalogue
from enginebay.plugins.hookspecs import PROVISION_HOOKS
from enginebay.plugins.suggest import did_you_mean

if TYPE_CHECKING:
    from enginebay.plugins.loader import LoadedPlugin, PluginLoader
    from enginebay.plugins.metadata import Entry
    from enginebay.plugins.registry import KnownPlugin

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def plugins() -> None:
    """List, show, compare and check plugins."""


@plugins.command("list")
@as_json_option
def list_plugins(as_json: bool) -> None:
    """List installed plugins, and known ones that are not installed, without importing any."""
    catalogue = Catalogue.discover()
    rows = [_installed_row(catalogue, entry) for entry in catalogue.entries]
    rows += [_known_row(known) for known in catalogue.not_installed]
    notes = [
        f"{copy.origin} is not used: {catalogue.copy_of(copy.distribution).origin} shadows it"
        for copy in catalogue.shadowed
    ]
    if as_json:
        click.echo(json.dumps({"plugins": rows, "notes": notes}, indent=2))
        return
    columns = ("kind", "name", "distribution", "version", "status", "summary")
    _print_table(columns, [tuple(row[c] for c in columns) for row in rows])
    for note in notes:
        click.echo(f"note: {note}")


@plugins.command()
@click.argument("plugin", metavar="[KIND:]NAME")
@as_json_option
def show(plugin: str, as_json: bool) -> None:
    """Show a plugin: where it comes from, and what its record declares. It is imported."""
    catalogue = Catalogue.discover()
    try:
        kind, name = _parse(catalogue, plugin)
        known = catalogue.known_plugin(kind, name)
        if not catalogue.named(kind, name) and known is not None:
            facts: dict[str, Any] = asdict(known)
        else:
            from enginebay.plugins.loader import PluginLoader

            loader = PluginLoader(catalogue)
            facts = _facts(loader.load(kind, name), catalogue.find(kind, name), loader)
    except EngineBayError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    width = max(map(len, facts))
    for key, value in facts.items():
        if value not in ("", None, [], ()):
            click.echo(f"{key.ljust(width)}  {_show(value, width)}")


@plugins.command()
@click.option("--distribution", metavar="NAME", help="Only the plugins of this distribution, such as enginebay.")
def matrix(distribution: str | None) -> None:
    """Print what attention backends support, as Markdown. They are imported; what they wrap is not."""
    from enginebay.plugins.loader import PluginLoader
    from enginebay.plugins.matrix import support_matrix
    from enginebay.plugins.records import AttentionRecord

    found, broken = PluginLoader(Catalogue.discover()).candidates("attention")
    for plugin in broken:
        click.echo(f"not shown: {plugin.error}", err=True)
    names = list(dict.fromkeys(plugin.identity.distribution for plugin in found))
    if distribution is not None and distribution not in names:
        raise click.ClickException(
            f"no attention backend is of distribution {distribution!r}; there are those of {', '.join(names)}."
            f"{did_you_mean(distribution, names)}"
        )
    shown = [plugin.record for plugin in found if distribution in (None, plugin.identity.distribution)]
    command = "enginebay plugins matrix" + (f" --distribution {distribution}" if distribution else "")
    click.echo(support_matrix([r for r in shown if isinstance(r, AttentionRecord)], command), nl=False)


@plugins.command()
@click.argument("kind", required=False)
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", help="Write KIND.md, of every kind or one, to DIR."
)
def reference(kind: str | None, out: Path | None) -> None:
    """Print what a plugin of KIND implements and what the conformance suite demands of it, as Markdown."""
    from enginebay.conformance.runner import require_pytest
    from enginebay.plugins.records import KINDS
    from enginebay.reference.page import reference_page

    if kind is None and out is None:
        raise click.UsageError(f"name a kind, of {', '.join(KINDS)}; or --out DIR for the pages of all")
    chosen = [known for known in KINDS if kind in (None, known)]
    if not chosen:
        raise PluginError(f"{kind!r} is not a kind; kinds: {', '.join(KINDS)}.{did_you_mean(str(kind), KINDS)}")
    require_pytest()  # the laws are test methods
    if out is None:
        click.echo(reference_page(chosen[0]), nl=False)
        return
    out.mkdir(parents=True, exist_ok=True)
    for known in chosen:
        (out / f"{known}.md").write_text(reference_page(known), encoding="utf-8")


@plugins.command()
@as_json_option
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Load every installed plugin and say how it is; exit status 1 if one cannot be used."""
    from enginebay.plugins.doctor import diagnose

    findings = diagnose()
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        colours = {"ok": "green", "disabled": "yellow", "note": "yellow", "conflict": "red", "broken": "red"}
        for f in findings:
            who = ":".join(filter(None, (f.kind, f.name)))
            origin = " ".join(filter(None, (f.distribution, f.version)))
            line = "  ".join(filter(None, (click.style(f.status.ljust(8), fg=colours[f.status]), who, origin)))
            click.echo(line)
            if f.path and f.status != "ok":
                click.echo(f"    at {f.path}")
            for text in (f.message, f.traceback):
                if text:
                    click.echo("    " + text.rstrip().replace("\n", "\n    "))
        faults = sum(f.is_fault for f in findings)
        click.echo(f"{faults} plugin(s) cannot be used" if faults else "no fault found")
    context.exit(1 if any(f.is_fault for f in findings) else 0)


def _installed_row(catalogue: Catalogue, entry: Entry) -> dict[str, str]:
    known = catalogue.known_plugin(entry.kind, entry.name)
    status = "installed"
    if catalogue.disabled_by(entry) is not None:
        status = "disabled"
    elif len(catalogue.claims(entry.kind, entry.name)) > 1:
        status = "conflict"
    return {
        "kind": entry.kind,
        "name": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "status": status,
        "summary": known.summary if known else catalogue.copy_of(entry.distribution).summary,
        "path": entry.path,
        "module": entry.module,
    }


def _known_row(known: KnownPlugin) -> dict[str, str]:
    return {
        "kind": known.kind,
        "name": known.name,
        "distribution": "",
        "version": "",
        "status": "not installed",
        "summary": f"{known.summary} ({known.install})",
        "path": "",
        "module": "",
    }


def _print_table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:  # one line a plugin, whatever its length, for grep
        widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
        for row in [columns, *rows]:
            click.echo("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
        return
    table = Table(*columns)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def _parse(catalogue: Catalogue, plugin: str) -> tuple[str, str]:
    """``attention:torch``, or ``torch`` where one kind has that name, as kind and name."""
    kind, colon, name = plugin.partition(":")
    if colon:
        if kind not in PROVISION_HOOKS:
            known = ", ".join(PROVISION_HOOKS)
            raise PluginError(f"{kind!r} is not a kind; kinds: {known}.{did_you_mean(kind, PROVISION_HOOKS)}")
        return kind, name
    pairs = [(e.kind, e.name) for e in catalogue.entries] + [(k.kind, k.name) for k in catalogue.known]
    kinds = list(dict.fromkeys(k for k, n in pairs if n == plugin))
    if len(kinds) == 1:
        return kinds[0], plugin
    if kinds:
        raise PluginError(f"{plugin!r} is the name of several plugins: {', '.join(f'{k}:{plugin}' for k in kinds)}")
    raise PluginError(f"no plugin is named {plugin!r}.{did_you_mean(plugin, [n for _, n in pairs])}")


def _facts(plugin: LoadedPlugin, entry: Entry, loader: PluginLoader) -> dict[str, Any]:
    """What a record declares, as plain data in its own order, after where it comes from."""
    record = plugin.record
    facts: dict[str, Any] = {
        "kind": entry.kind,
        "name": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "module": entry.value,
        "path": entry.path,
    }
    for field in fields(record):
        if field.name not in ("name", "factory", "check", "options"):
            facts[field.name] = _plain(getattr(record, field.name))
    facts["options"] = {
        name: str(option.description or option.annotation) for name, option in record.options.model_fields.items()
    }
    facts["documentation"] = (loader.manager.get_plugin(plugin.plugin_name).__doc__ or "").strip()
    return facts


def _plain(value: Any) -> Any:
    if is_dataclass(value) and hasattr(value, "name"):
        return value.name
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _show(value: Any, width: int) -> str:
    if isinstance(value, dict):
        return ("\n" + " " * (width + 2)).join(f"{key}: {text}" for key, text in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value).replace("\n", "\n" + " " * (width + 2))
