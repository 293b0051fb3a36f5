"""``enginebay new``: what it says, and what it refuses. Its commands are run in tests/e2e/test_acme.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from enginebay.cli import cli
from enginebay.scaffold.package import YAML_KEYS


def new(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["new", *arguments])


def test_it_says_what_to_do_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = new("attention", "acme_z")
    assert result.exit_code == 0, result.output
    first, _, *commands = result.output.splitlines()
    assert first.startswith("enginebay-acme-z holds a working plugin.")
    assert [line.split(" ", 3)[-1] for line in commands] == [
        line.split(" ", 3)[-1]
        for line in (
            "  pip install -e './enginebay-acme-z[dev]'",
            "  enginebay conformance run attention:acme_z",
            "  enginebay run --set attention.backend=acme_z --prompt 'The capital of France is'",
        )
    ]
    assert (tmp_path / "enginebay-acme-z" / "pyproject.toml").exists()


@pytest.mark.parametrize(("kind", "key"), YAML_KEYS.items())
def test_each_kind_is_named_in_its_own_bay(kind: str, key: str, tmp_path: Path) -> None:
    result = new(kind, "acme_z", "--out", str(tmp_path / "with space"))
    assert result.exit_code == 0, result.output
    assert f"pip install -e '{tmp_path}/with space/enginebay-acme-z[dev]'" in result.output
    assert f"--set {key}=acme_z" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("atention", "acme"), "Did you mean 'attention'?"),
        (("model", "acme"), "there is no package to begin with for the kind model"),
        (("attention", "My-Attn"), "such as 'my_attn'"),
        (("attention", "torch"), "attention:torch is installed already"),
    ],
)
def test_what_cannot_be_written_is_refused_in_one_message(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    result = new(*arguments, "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert message in result.stderr
    assert not (tmp_path / "out").exists()
