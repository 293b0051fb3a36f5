from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from enginebay.cli.plugins import plugins
from enginebay.plugins.catalogue import Catalogue
from enginebay.plugins.registry import KnownPlugin

SOURCE = '''"""Acme's kernels, at length."""
from enginebay import hookimpl
from enginebay.plugins.records import AttentionRecord
from pydantic import BaseModel, Field


class Options(BaseModel):
    split: int = Field(4, description="parts of a long row")


@hookimpl
def enginebay_attention_backends():
    return [
        AttentionRecord(
            name="acme", summary="Acme's kernels", factory=print, api_version=0, options=Options,
            dtypes=("float32", "bfloat16"), kv_dtypes=("float32",), head_dims=(64, 128),
        )
    ]
'''
KNOWN = KnownPlugin(
    kind="quant",
    name="absent",
    summary="not here",
    install="pip install absent",
    source="https://example.org",
    devices=("cuda",),
    status="stable",
)


class Site:
    """A folder of distributions, the only one that the commands see."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, distribution: str, kind: str, name: str, module: str, source: str | None = None) -> None:
        info = self.root / f"{distribution}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {distribution}\nVersion: 1.0\nSummary: about it\n")
        (info / "entry_points.txt").write_text(f"[enginebay.{kind}]\n{name} = {module}\n")
        if source is not None:
            (self.root / f"{module}.py").write_text(source)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("ENGINEBAY_DISABLE_PLUGINS", raising=False)
    catalogue = Catalogue.discover
    monkeypatch.setattr(Catalogue, "discover", lambda: catalogue([str(tmp_path)], known=[KNOWN]))
    monkeypatch.delitem(sys.modules, "cli_acme", raising=False)
    return Site(tmp_path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(plugins, arguments)


def test_list_shows_what_is_installed_and_known(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add("eb-acme", "attention", "acme", "cli_acme", "raise RuntimeError('imported')")
    site.add("eb-off", "executor", "off", "cli_off")
    site.add("clash1", "scheduler", "same", "cli_clash1")
    site.add("clash2", "scheduler", "same", "cli_clash2")
    monkeypatch.setenv("ENGINEBAY_DISABLE_PLUGINS", "off")
    result = run("list")
    assert result.exit_code == 0
    rows = [line.split() for line in result.output.splitlines()]
    assert rows[0] == ["kind", "name", "distribution", "version", "status", "summary"]
    assert rows[1] == ["attention", "acme", "eb-acme", "1.0", "installed", "about", "it"]
    assert rows[2][:5] == ["executor", "off", "eb-off", "1.0", "disabled"]
    assert [row[4] for row in rows[3:5]] == ["conflict", "conflict"]
    assert rows[5] == ["quant", "absent", "not", "installed", "not", "here", "(pip", "install", "absent)"]


def test_list_is_a_table_on_a_terminal(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add("eb-acme", "attention", "acme", "cli_acme")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    output = run("list").output
    assert "┃" in output
    assert "eb-acme" in output


def test_list_json(site: Site) -> None:
    site.add("eb-acme", "attention", "acme", "cli_acme")
    data = json.loads(run("list", "--json").output)
    assert [(p["kind"], p["name"], p["status"]) for p in data["plugins"]] == [
        ("attention", "acme", "installed"),
        ("quant", "absent", "not installed"),
    ]
    assert data["plugins"][0]["path"].endswith("eb-acme-1.0.dist-info")


def test_list_notes_stale_metadata_c9(site: Site) -> None:
    site.add("eb-acme", "attention", "acme", "cli_acme")
    old = site.root / "eb_acme-0.9.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Name: eb-acme\nVersion: 0.9\n")
    output = run("list").output
    assert f"note: eb-acme 0.9 at {old} is not used" in output


@pytest.mark.parametrize("name", ["acme", "attention:acme"])
def test_show_prints_the_record(site: Site, name: str) -> None:
    site.add("eb-acme", "attention", "acme", "cli_acme", SOURCE)
    result = run("show", name)
    assert result.exit_code == 0
    lines = {line.split()[0]: line.split(maxsplit=1)[-1] for line in result.output.splitlines()}
    assert lines["distribution"] == "eb-acme"
    assert lines["head_dims"] == "64, 128"
    assert lines["layouts"] == "NHD"
    assert lines["window"] == "False"
    assert lines["options"] == "split: parts of a long row"
    assert lines["documentation"] == "Acme's kernels, at length."


def test_show_json(site: Site) -> None:
    site.add("eb-acme", "attention", "acme", "cli_acme", SOURCE)
    data = json.loads(run("show", "--json", "acme").output)
    assert (data["name"], data["dtypes"], data["layouts"]) == ("acme", ["float32", "bfloat16"], ["NHD"])
    assert data["options"] == {"split": "parts of a long row"}


def test_show_of_a_known_plugin_says_how_to_install_it(site: Site) -> None:
    result = run("show", "absent")
    assert result.exit_code == 0
    assert "pip install absent" in result.output


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("acmee", "Did you mean 'acme'?"),
        ("attention:acmee", "Did you mean 'acme'?"),
        ("atention:acme", "Did you mean 'attention'?"),
        ("both", "attention:both, executor:both"),
        ("broken", "cannot be imported: ZeroDivisionError"),
    ],
)
def test_show_errors_say_what_to_do(site: Site, name: str, complaint: str) -> None:
    site.add("eb-acme", "attention", "acme", "cli_acme")
    site.add("eb-both1", "attention", "both", "cli_both")
    site.add("eb-both2", "executor", "both", "cli_both")
    site.add("eb-broken", "quant", "broken", "cli_broken", "1 / 0")
    result = run("show", name)
    assert result.exit_code == 1
    assert complaint in result.output


def test_matrix_shows_attention_backends_and_names_broken_ones(site: Site) -> None:
    site.add("eb-acme", "attention", "acme", "cli_acme", SOURCE)
    site.add("eb-broken", "attention", "broken", "cli_broken", "1 / 0")
    result = run("matrix")
    assert result.exit_code == 0
    assert "|  | `acme` |" in result.stdout
    assert "| head sizes | 64, 128 |" in result.stdout
    assert "not shown: plugin attention:broken (eb-broken 1.0" in result.stderr
    assert "ZeroDivisionError" in result.stderr
    assert run("matrix", "--distribution", "eb-acme").stdout == result.stdout.replace(
        "enginebay plugins matrix", "enginebay plugins matrix --distribution eb-acme"
    )
    refused = run("matrix", "--distribution", "eb-acm")
    assert refused.exit_code == 1
    assert "there are those of eb-acme. Did you mean 'eb-acme'?" in refused.stderr


def test_doctor_is_quiet_about_health(site: Site) -> None:
    site.add("eb-acme", "attention", "acme", "cli_acme", SOURCE)
    result = run("doctor")
    assert result.exit_code == 0
    assert "ok" in result.output
    assert "no fault found" in result.output


def test_doctor_shows_the_traceback_and_exits_1_c8(site: Site) -> None:
    site.add("eb-acme", "attention", "acme", "cli_acme", SOURCE)
    site.add("eb-broken", "quant", "broken", "cli_broken", "1 / 0")
    result = run("doctor")
    assert result.exit_code == 1
    assert "quant:broken" in result.output
    assert "ZeroDivisionError" in result.output
    assert 'cli_broken.py", line 1' in result.output
    assert "1 plugin(s) cannot be used" in result.output
    data = json.loads(run("doctor", "--json").output)
    assert {f["name"]: f["status"] for f in data} == {"acme": "ok", "broken": "broken"}


def test_a_broken_plugin_does_not_break_help_or_list_c15(site: Site) -> None:
    site.add("eb-broken", "quant", "broken", "cli_broken", "1 / 0")
    assert run("--help").exit_code == 0
    assert run("list").exit_code == 0


def test_list_imports_no_torch_pydantic_or_plugin() -> None:
    program = (
        "import sys\nfrom enginebay.cli.plugins import plugins\n"
        "plugins(['list'], standalone_mode=False)\n"
        "bad = [m for m in sys.modules if m in ('torch', 'pydantic', 'transformers') or m.startswith('enginebay_')]\n"
        "assert not bad, bad\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "LlamaForCausalLM" in done.stdout
