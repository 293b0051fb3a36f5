"""``enginebay models``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from enginebay.cli import cli
from enginebay.models.catalogue import CATALOGUE, find


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENGINEBAY_CACHE", str(tmp_path))
    return tmp_path


def test_list_as_json() -> None:
    result = CliRunner().invoke(cli, ["models", "list", "--json"])
    rows = {row["name"]: row for row in json.loads(result.output)["models"]}
    assert rows.keys() == CATALOGUE.keys()
    assert rows["gemma3-270m"]["terms"].startswith("https://")
    assert not rows["smollm2-135m-instruct"]["cached"]


def test_list_for_people() -> None:
    output = CliRunner().invoke(cli, ["models", "list"]).output
    assert all(name in output for name in CATALOGUE)
    assert "98 MB" in output


def test_path_of_what_is_not_there(cache: Path) -> None:
    result = CliRunner().invoke(cli, ["models", "path", "gemma3-270m"])
    assert result.exit_code == 1
    assert result.stdout.strip() == str(find("gemma3-270m").path)
    assert "enginebay models fetch gemma3-270m" in result.stderr


def test_unknown_name() -> None:
    result = CliRunner().invoke(cli, ["models", "fetch", "gemma3-270n"])
    assert result.exit_code == 1
    assert "Did you mean 'gemma3-270m'?" in result.stderr


def test_terms_are_refused_without_a_terminal_and_a_flag(cache: Path) -> None:
    result = CliRunner().invoke(cli, ["models", "fetch", "gemma3-270m"])
    assert result.exit_code == 1
    assert "--accept-terms" in result.stderr
    assert not any(cache.iterdir())


def test_a_damaged_file_is_reported() -> None:
    model = find("smollm2-135m-instruct")
    model.folder.mkdir(parents=True)
    with model.path.open("wb") as file:
        file.truncate(model.size_bytes)
    result = CliRunner().invoke(cli, ["models", "fetch", model.name])
    assert result.exit_code == 1
    assert "is damaged" in result.stderr
    assert CliRunner().invoke(cli, ["models", "path", model.name]).exit_code == 0


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from enginebay.cli import cli\n"
        "assert CliRunner().invoke(cli, ['models', 'list']).exit_code == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
