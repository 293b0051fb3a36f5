"""``enginebay conformance``: try a plugin against its kind's contract."""

from __future__ import annotations

from pathlib import Path

import click

from enginebay.conformance.runner import REPORTS, ReportKind, run
from enginebay.conformance.suite_names import SUITE_OF_KIND
from enginebay.errors import EngineBayError
from enginebay.plugins.suggest import did_you_mean


@click.group()
def conformance() -> None:
    """Try a plugin against its kind's contract."""


@conformance.command("run")
@click.argument("plugin", metavar="KIND:NAME")
@click.option(
    "--local", metavar="FILE", default="", help="The plugin file that provides it, where it is not installed."
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option(
    "--level",
    type=click.Choice(["core", "full"]),
    default="core",
    show_default=True,
    help="core: within a minute; full: sizes as they are met in use.",
)
@click.option("--exhaustive", is_flag=True, help="All combinations of features instead of all pairs.")
@click.option("--report", metavar="KINDS", default="", help=f"Reports to write, of {', '.join(REPORTS)}; with commas.")
@click.option("--out", type=click.Path(path_type=Path), default=Path(), help="The folder that reports go to.")
@click.option("--laws", metavar="EXPRESSION", default="", help="Only laws whose name matches, as pytest's -k.")
@click.option("-v", "--verbose", is_flag=True, help="A line a case.")
@click.pass_context
def run_command(
    context: click.Context,
    plugin: str,
    local: str,
    device: str,
    level: str,
    exhaustive: bool,
    report: str,
    out: Path,
    laws: str,
    verbose: bool,
) -> None:
    """Run the suite on a plugin, such as attention:acme.

    Exit status 0: every law held; 1: one did not; 2: nothing was proved, for instance since the plugin needs another device.
    """
    kind, colon, name = plugin.partition(":")
    if not colon or not name:
        raise EngineBayError(f"{plugin!r} is not KIND:NAME, such as attention:{plugin.strip(':') or 'acme'}")
    if kind not in SUITE_OF_KIND:
        kinds = ", ".join(SUITE_OF_KIND)
        raise EngineBayError(
            f"there is no conformance suite of the kind {kind!r}; there are {kinds}.{did_you_mean(kind, SUITE_OF_KIND)}"
        )
    status = run(
        kind,
        name,
        local=local,
        device=device,
        level=level,
        exhaustive=exhaustive,
        reports=_reports(report),
        out=out,
        laws=laws,
        verbose=verbose,
    )
    if status == 2:
        click.echo(
            "not judged: laws were left out, or nothing that runs the plugin could be run; --report md says why, law by law",
            err=True,
        )
    context.exit(status)


def _reports(words: str) -> list[ReportKind]:
    """Comma-separated kinds of report."""
    asked = [word.strip() for word in words.split(",") if word.strip()]
    for word in asked:
        if word not in REPORTS:
            raise EngineBayError(f"--report {word}: there are {', '.join(REPORTS)}.{did_you_mean(word, REPORTS)}")
    return [kind for kind in REPORTS if kind in asked]
