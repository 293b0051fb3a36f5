"""The command group: lazy, unbreakable help, errors without tracebacks."""

from __future__ import annotations

import errno
import subprocess
import sys
import types

import click
import pytest
from click.testing import CliRunner
from enginebay import __version__, cli
from enginebay.errors import ConfigError, EngineBayError

HEAVY = ("torch", "transformers", "rich", "pydantic", "yaml")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def boom(monkeypatch: pytest.MonkeyPatch) -> str:
    """A sub-command that fails with an error of ours."""

    @click.command()
    def command() -> None:
        raise ConfigError("dtype (engine.yaml:3): wrong")

    module = types.ModuleType("enginebay_test_boom")
    module.command = command  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.COMMANDS, "boom", (f"{module.__name__}:command", "Fails."))
    return "boom"


def test_importing_the_command_line_imports_nothing_heavy() -> None:
    done = python(f"import sys, enginebay.cli; print([m for m in {HEAVY} if m in sys.modules])")
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_help_lists_every_command_and_imports_none() -> None:
    done = python(
        "import sys\nfrom enginebay.cli import cli\n"
        "try:\n    cli(['--help'])\nexcept SystemExit: pass\n"
        f"print('heavy', [m for m in {HEAVY} if m in sys.modules])\n"
        "print('commands', [m for m in sys.modules if m.startswith('enginebay.cli.')])"
    )
    assert done.stderr == ""
    assert "heavy []" in done.stdout
    assert "commands []" in done.stdout
    for name, (_, summary) in cli.COMMANDS.items():
        assert name in done.stdout
        assert summary[:30] in done.stdout


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("enginebay_no_such_module:x", "cannot be loaded from enginebay_no_such_module: No module named"),
        ("enginebay.errors:EngineBayError", "is not a click command"),
    ],
)
def test_c15_a_broken_command_does_not_break_help(monkeypatch: pytest.MonkeyPatch, target: str, words: str) -> None:
    """C15: one broken module is its own command's error."""
    monkeypatch.setitem(cli.COMMANDS, "broken", (target, "Broken."))
    shown = CliRunner().invoke(cli.cli, ["--help"])
    assert shown.exit_code == 0
    assert "Broken." in shown.output
    assert CliRunner().invoke(cli.cli, ["config", "--help"]).exit_code == 0
    failed = CliRunner().invoke(cli.cli, ["broken"])
    assert failed.exit_code == 1
    assert words in failed.stderr


def test_our_errors_are_one_message_and_status_1(boom: str) -> None:
    failed = CliRunner().invoke(cli.cli, [boom])
    assert (failed.exit_code, failed.stdout, failed.stderr) == (1, "", "error: dtype (engine.yaml:3): wrong\n")


def test_the_message_is_red_in_a_terminal(boom: str) -> None:
    assert "\x1b[31m" in CliRunner().invoke(cli.cli, [boom], color=True).stderr


def test_traceback_on_demand(boom: str) -> None:
    failed = CliRunner().invoke(cli.cli, ["--traceback", boom])
    assert isinstance(failed.exception, EngineBayError)


def test_version() -> None:
    assert CliRunner().invoke(cli.cli, ["--version"]).output == f"enginebay, version {__version__}\n"


def test_an_unknown_command() -> None:
    failed = CliRunner().invoke(cli.cli, ["nope"])
    assert failed.exit_code == 2
    assert "No such command 'nope'" in failed.stderr


def test_python_dash_m() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "enginebay", "--version"], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"enginebay, version {__version__}\n")


@pytest.mark.parametrize(("word", "hint"), [("plugin", " Did you mean 'plugins'?"), ("zzz", "")])
def test_a_misspelt_command_is_answered_with_the_near_one(word: str, hint: str) -> None:
    result = CliRunner().invoke(cli.cli, [word])
    assert result.exit_code == 2
    assert result.output.rstrip().endswith(f"No such command {word!r}.{hint}")


def test_a_full_disk_is_no_traceback(boom: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys.modules["enginebay_test_boom"], "command", full)
    result = CliRunner().invoke(cli.cli, [boom])
    assert result.exit_code == 1
    assert "error: no space is left" in result.output
