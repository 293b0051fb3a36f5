"""``enginebay new``: the package of a plugin of one's own, and what to do with it next."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import click

from enginebay.plugins.catalogue import Catalogue
from enginebay.scaffold.names import new_names
from enginebay.scaffold.package import YAML_KEYS, require_kind, write_package


@click.command()
@click.argument("kind")
@click.argument("name")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path(),
    metavar="DIR",
    help="The folder that the package's folder goes to.  [default: where you are]",
)
def new(kind: str, name: str, out: Path) -> None:
    """Write the package of a plugin called NAME, ready to be installed and tried.

    KIND is attention or scheduler. NAME is the word that engine.yaml will name it by; the package is enginebay-NAME.
    """
    known = require_kind(kind)
    folder = write_package(known, new_names(known, name, Catalogue.discover()), out)
    click.echo(f"{folder} holds a working plugin. Install it, try it against the laws of its kind, use it:\n")
    place = folder if folder.is_absolute() else f"./{folder}"
    click.echo(f"  {_program('pip')} install -e {shlex.quote(f'{place}[dev]')}")
    click.echo(f"  {_program('enginebay')} conformance run {known}:{name}")
    click.echo(
        f"  {_program('enginebay')} run --set {YAML_KEYS[known]}={name} --prompt {shlex.quote('The capital of France is')}"
    )


def _program(name: str) -> str:
    """How to call a program of the Python that runs this: a shell may find another one by its bare name."""
    own = Path(sys.executable).with_name(name)
    if (found := shutil.which(name)) and Path(found) == own:
        return name
    return shlex.quote(str(own)) if own.exists() else f"{shlex.quote(sys.executable)} -m {name}"
