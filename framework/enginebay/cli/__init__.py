"""The ``enginebay`` command. A sub-command's module is imported when that command is invoked, and not before.

So ``--help`` imports no torch and no plugin, and a broken module or plugin cannot break it.
"""

from __future__ import annotations

import difflib
import errno
import importlib
from typing import Any

import click

from enginebay import __version__
from enginebay.errors import EngineBayError

#: name -> (where the click command is, the line that ``--help`` shows)
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("enginebay.cli.run:run", "Generate text for one or more prompts."),
    "chat": ("enginebay.cli.run:chat", "Talk with a model in the terminal."),
    "explain": ("enginebay.cli.explain:explain", "Show which part fills each bay, and why, without loading a model."),
    "bench": ("enginebay.cli.bench:bench", "Measure throughput, latency and start of an engine, ours or a peer's."),
    "models": ("enginebay.cli.models:models", "List, fetch and show packaged models."),
    "plugins": ("enginebay.cli.plugins:plugins", "List, show and check plugins."),
    "new": ("enginebay.cli.new:new", "Write the package of a plugin of your own."),
    "conformance": ("enginebay.cli.conformance:conformance", "Try a plugin against its kind's contract."),
    "config": ("enginebay.cli.config:config", "Show the effective configuration, or its JSON schema."),
}


class LazyGroup(click.Group):
    """A click group over `COMMANDS` that turns an `EngineBayError` into one red message and exit status 1."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the table's order."""
        return [*COMMANDS, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        try:
            command = getattr(importlib.import_module(module), attribute)
        except ImportError as error:
            raise EngineBayError(
                f"the command {cmd_name!r} cannot be loaded from {module}: {error}; reinstall enginebay, or see "
                f"enginebay --traceback {cmd_name}"
            ) from error
        if not isinstance(command, click.Command):
            raise EngineBayError(f"{module}:{attribute} is not a click command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's own, whose suggestions know no lazy command."""
        if args and args[0].isidentifier() and args[0] not in self.list_commands(ctx) and not ctx.resilient_parsing:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error that a user can cause is shown without a traceback."""
        try:
            return super().invoke(ctx)
        except EngineBayError as error:
            if ctx.params["traceback"]:
                raise
            self._refuse(ctx, str(error))
        except OSError as error:
            if error.errno != errno.ENOSPC or ctx.params["traceback"]:
                raise
            self._refuse(ctx, f"no space is left where the output, or a file, is written: {error}; free some there")

    @staticmethod
    def _refuse(ctx: click.Context, text: str) -> None:
        click.echo(f"{click.style('error:', fg='red', bold=True)} {text}", err=True)
        ctx.exit(1)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--traceback", is_flag=True, help="Show the Python traceback of an error.")
@click.version_option(__version__, prog_name="enginebay")
def cli(traceback: bool) -> None:
    """Run language models on parts that plugins provide."""


def main() -> None:
    """Entry point of the ``enginebay`` script and of ``python -m enginebay``."""
    cli(prog_name="enginebay")
