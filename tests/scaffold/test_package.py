"""What is written: complete, typed, formatted, and refused where something is in its place. Whether it works: tests/e2e."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from enginebay.errors import EngineBayError, PluginError
from enginebay.plugins.loader import PluginLoader
from enginebay.plugins.records import Kind
from enginebay.scaffold.names import PluginNames
from enginebay.scaffold.package import YAML_KEYS, require_kind, write_package

ROOT = Path(__file__).parents[2]
#: a short name, the longest, and one with digits: none may break a line or a rule
NAMES = ("z", "a" * 32, "acme_2_fast")


@pytest.mark.parametrize("kind", YAML_KEYS)
def test_a_package_has_its_files_and_no_placeholder(kind: Kind, tmp_path: Path) -> None:
    folder = write_package(kind, PluginNames("acme_z"), tmp_path / "deep" / "out")
    part = {"attention": "backend.py", "scheduler": "policy.py"}[kind]
    module = "src/enginebay_acme_z"
    assert folder == tmp_path / "deep" / "out" / "enginebay-acme-z"
    assert sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()) == sorted(
        ["README.md", "pyproject.toml", "tests/test_conformance.py"]
        + [f"{module}/{file}" for file in ("__init__.py", "py.typed", part)]
    )
    for file in folder.rglob("*.*"):
        if file.is_file():
            assert "${" not in file.read_text()
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["project"]["entry-points"] == {f"enginebay.{kind}": {"acme_z": "enginebay_acme_z"}}


@pytest.mark.parametrize("kind", YAML_KEYS)
def test_the_record_is_below_the_built_in_ones_and_imports_no_torch(kind: Kind, tmp_path: Path) -> None:
    folder = write_package(kind, PluginNames("acme_z"), tmp_path)
    loader = PluginLoader()
    loader.add_local(str(folder / "src" / "enginebay_acme_z"))
    record = loader.load(kind, "acme_z").record
    assert record.priority < min(p.record.priority for p in loader.candidates(kind)[0] if p.record.name != "acme_z")
    code = "import sys, enginebay_acme_z; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=folder / "src")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", YAML_KEYS)
def test_what_is_written_is_formatted_and_has_no_lint(kind: Kind, name: str, tmp_path: Path) -> None:
    folder = write_package(kind, PluginNames(name), tmp_path)
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", "."],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", YAML_KEYS)
def test_what_is_written_passes_strict_types(kind: Kind, tmp_path: Path) -> None:
    """As its own configuration has it, from its own folder."""
    folder = write_package(kind, PluginNames("acme_z"), tmp_path)
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(ROOT / ".mypy_cache" / "scaffold")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "enginebay-acme-z").mkdir()
    (tmp_path / "enginebay-acme-z" / "notes").write_text("mine")
    with pytest.raises(EngineBayError, match="enginebay-acme-z exists already, and nothing is written over it"):
        write_package("attention", PluginNames("acme_z"), tmp_path)
    assert [file.name for file in (tmp_path / "enginebay-acme-z").iterdir()] == ["notes"]


def test_a_file_in_the_way_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(EngineBayError, match=r"out exists already|cannot be written"):
        write_package("attention", PluginNames("acme_z"), tmp_path / "out")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("atention", "'atention' is not a kind; .* for attention.* Did you mean 'attention'?"),
        (
            "quant",
            "for the kind quant; .* The docstring of enginebay_quantizers in enginebay.plugins.hookspecs holds a",
        ),
    ],
)
def test_a_kind_without_templates_is_refused(word: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        require_kind(word)
