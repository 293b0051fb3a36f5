"""``enginebay explain`` over a made-up explanation."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from click.testing import CliRunner
from enginebay.cli import cli
from enginebay.config import LoadedConfig, ResolvedConfig
from enginebay.plugins.requirements import Reason
from enginebay.plugins.selection import Rejected, Selection

RESOLVED = ResolvedConfig(
    dtype="float32",
    kv_dtype="float32",
    device="cpu",
    max_model_len=4096,
    block_size=16,
    max_num_batched_tokens=2048,
    why={"dtype": "the processor computes bfloat16 slowly"},
)
REJECTED = Rejected("flashinfer", "acme 1.0", (Reason(code="device", wanted="cpu", allowed="cuda"),))
SELECTION = Selection(
    kind="attention", wanted="auto", source="auto", chosen=None, identity=None, note="none", rejected=(REJECTED,)
)


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A configuration file; it is explained as above."""

    def explain(loaded: LoadedConfig) -> SimpleNamespace:
        assert loaded.config.model == "m.gguf"
        return SimpleNamespace(resolved=RESOLVED, selections=(SELECTION,))

    explanation = ModuleType("enginebay.engine.explanation")
    vars(explanation)["explain"] = explain
    monkeypatch.setitem(sys.modules, "enginebay.engine.explanation", explanation)
    monkeypatch.setattr("enginebay.engine.explanation", explanation, raising=False)
    path = tmp_path / "engine.yaml"
    path.write_text("model: m.gguf\nscheduler:\n  max_num_seqs: 4\n")
    return path


def test_every_choice_and_setting_is_shown_with_its_origin(file: Path) -> None:
    """C2: the source of a value is shown, the command line's over the file's."""
    result = CliRunner().invoke(cli, ["explain", str(file), "--set", "scheduler.max_num_batched_tokens=99"])
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert any("flashinfer: device: wanted cpu, allowed cuda" in line for line in lines)
    assert "dtype float32 the processor computes bfloat16 slowly" in lines
    assert "max_model_len 4096" in lines
    settings = {line.split()[0]: line for line in lines[lines.index("settings and where they come from:") + 1 :]}
    assert f"{file.name}:3" in settings["scheduler.max_num_seqs"]
    assert "scheduler.max_num_batched_tokens 99" in settings["scheduler.max_num_batched_tokens"]
    assert "--set" in settings["scheduler.max_num_batched_tokens"]
    assert settings["cache.prefix_caching"].endswith("default")


def test_json_holds_the_same(file: Path) -> None:
    result = CliRunner().invoke(cli, ["explain", str(file), "--json"])
    data = json.loads(result.stdout)
    assert data["config"]["scheduler"]["max_num_seqs"] == 4
    assert data["sources"]["scheduler.max_num_seqs"].endswith(f"{file.name}:3")
    assert data["resolved"]["max_model_len"] == 4096
    assert data["bays"][0]["rejected"][0]["reasons"][0]["code"] == "device"


def test_a_wrong_configuration_is_one_message(file: Path) -> None:
    file.write_text("modle: x\n")
    result = CliRunner().invoke(cli, ["explain", str(file)])
    assert result.exit_code == 1
    assert "modle" in result.stderr
    assert "Traceback" not in result.stderr
