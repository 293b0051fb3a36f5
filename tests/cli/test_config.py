"""``enginebay config`` and the options that engine commands share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from enginebay.cli import cli
from enginebay.cli import config as config_module
from enginebay.cli.options import engine_options
from enginebay.config import LoadedConfig, load_config
from enginebay.errors import PluginError
from enginebay.plugins.catalogue import Catalogue
from enginebay.plugins.loader import BrokenPlugin, PluginLoader
from pydantic import BaseModel

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run ``enginebay …`` in an empty folder and an environment without ENGINEBAY_* variables."""
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("ENGINEBAY_")]:
        monkeypatch.delenv(name)

    def run(*args: str, env: dict[str, str] | None = None) -> Result:
        return CliRunner().invoke(cli, list(args), env=env)

    return run


def test_show_names_the_source_of_every_value(invoke: Invoke) -> None:
    """C2: the source of a value is shown."""
    Path("engine.yaml").write_text("scheduler:\n  max_num_seqs: 8\n  chunked_prefill: false\n")
    shown = invoke("config", "show", "engine.yaml", "--set", "seed=3", env={"ENGINEBAY_DTYPE": "float32"})
    assert shown.exit_code == 0
    lines = {line.split("#")[0].strip(): line.partition("# ")[2] for line in shown.output.splitlines()}
    assert lines["max_num_seqs: 8"] == "engine.yaml:2"
    assert lines["chunked_prefill: false"] == "engine.yaml:3"
    assert lines["seed: 3"] == "--set seed=3"
    assert lines["dtype: float32"] == "ENGINEBAY_DTYPE"
    assert lines["tokenizer: null"] == "default"


@pytest.mark.parametrize(
    "setting",
    [
        "seed=3",
        "attention.backend={prefill: torch, decode: x}",
        'attention.options={a: {b: [1, "x y", true], "c: d": 1e-6}, e: null}',
        'model="two\\nlines # and: more"',
        "quant={method: fp8}",
        "graphs.decode_sizes=[1, 2]",
        "plugins=[/a.py]",
        "scheduler.options={text: 'no', multi: \"a\\nb\"}",
    ],
)
def test_what_show_prints_is_the_same_configuration(invoke: Invoke, setting: str) -> None:
    Path("shown.yaml").write_text(invoke("config", "show", "--set", setting).output)
    assert load_config("shown.yaml", env={}).config == load_config(None, [setting], env={}).config


def test_show_reports_a_wrong_file(invoke: Invoke) -> None:
    Path("engine.yaml").write_text("dtyp: auto\n")
    failed = invoke("config", "show", "engine.yaml")
    assert failed.exit_code == 1
    assert failed.stderr == "error: dtyp (engine.yaml:1): unknown key; did you mean dtype?\n"


class AcmeOptions(BaseModel):
    kv_splits: int = 1


def test_schema_is_json_with_the_options_of_installed_plugins(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "installed_options", lambda: {("attention", "acme"): AcmeOptions})
    schema = json.loads(invoke("config", "schema").stdout)
    assert schema["properties"]["scheduler"]["$ref"] == "#/$defs/SchedulerConfig"
    assert "kv_splits" in schema["$defs"]["attention.acme"]["properties"]


def test_c15_a_broken_plugin_is_named_and_left_out_of_the_schema(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C15: the schema of everything else is still printed."""
    error = PluginError("plugin attention:acme cannot be imported")

    def candidates(self: PluginLoader, kind: str) -> tuple[list[object], list[BrokenPlugin]]:
        return [], [BrokenPlugin(kind, "acme", "acme 1.0", error)] if kind == "attention" else []

    monkeypatch.setattr(PluginLoader, "candidates", candidates)
    monkeypatch.setattr(Catalogue, "discover", classmethod(lambda cls: Catalogue(copies=())))
    shown = invoke("config", "schema")
    assert shown.exit_code == 0
    assert shown.stderr == "left out: plugin attention:acme cannot be imported\n"
    assert json.loads(shown.stdout)["title"] == "EngineConfig"


def test_engine_options_hand_a_loaded_configuration_to_a_command(invoke: Invoke) -> None:
    @click.command()
    @engine_options
    @click.option("--prompt")
    def command(loaded: LoadedConfig, prompt: str) -> None:
        """Its own help."""
        click.echo(f"{loaded.config.seed} {loaded.where('seed')} {prompt}")

    Path("engine.yaml").write_text("seed: 1\n")
    assert CliRunner().invoke(command, ["engine.yaml", "--prompt", "hi"]).output == "1 engine.yaml:1 hi\n"
    assert CliRunner().invoke(command, ["--set", "seed=2", "--prompt", "hi"]).output == "2 --set seed=2 hi\n"
    shown = CliRunner().invoke(command, ["--help"]).output
    assert "[ENGINE_YAML]" in shown
    assert "Its own help." in shown
