"""``enginebay bench``: options, refusals, and whole commands on a tiny model with random weights."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from click.testing import CliRunner, Result
from enginebay.cli import cli

Run = Callable[..., Result]
SMALL = ("--input-len", "6", "--output-len", "4", "--num-iters", "2")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a sub-command on a tiny model in a temporary folder."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    config.save_pretrained(tmp_path / "tiny")
    (tmp_path / "engine.yaml").write_text(f"model: {tmp_path / 'tiny'}\nload_format: dummy\ndtype: float32\n")
    return lambda command, *args: CliRunner().invoke(cli, ["bench", command, "engine.yaml", *args])


def read(path: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Path(path).read_text())
    return data


def test_throughput_of_ours(bench: Run) -> None:
    result = bench("throughput", *SMALL, "--num-prompts", "3", "--seed", "7", "--json", "out.json")
    assert result.exit_code == 0, result.output
    for words in ("requests/s", "output tok/s", "first token (TTFT), ms", "inter-token, ms", "p99"):
        assert words in result.stdout
    data = read("out.json")
    assert data["schema"] == "enginebay.bench/1"
    assert data["workload"] == {
        "num_prompts": 3,
        "input_len": 6,
        "output_len": 4,
        "seed": 7,
        "num_warmups": 1,
        "num_iters": 2,
        "temperature": 0.0,
    }
    assert data["engine"]["name"] == "enginebay"
    assert data["engine"]["parts"]["scheduler"] == "fcfs"
    assert data["engine"]["settings"]["written"]["load_format"] == "dummy"
    assert len(data["figures"]["seconds"]) == 2
    ratio = data["figures"]["input_tokens_per_s"] / data["figures"]["output_tokens_per_s"]
    assert ratio == pytest.approx(6 / 4)
    assert set(data["figures"]["ttft_ms"]) == {"mean", "min", "max", "p50", "p90", "p99"}


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="the bench extra")
def test_latency_of_transformers_with_a_plot(bench: Run) -> None:
    args = ("--engine", "transformers", "--batch-size", "2", "--temperature", "0.7", "--plot", "p.SVG", "--json", "o")
    result = bench("latency", *SMALL, *args)
    assert result.exit_code == 0, result.output
    assert "whole batch, ms" in result.stdout
    assert Path("p.SVG").stat().st_size > 3000
    assert read("o")["engine"]["name"] == "transformers"
    assert read("o")["workload"]["temperature"] == 0.7


def test_startup_through_another_interpreter(bench: Run) -> None:
    args = ("--engine", "transformers", "--peer-python", sys.executable, "--input-len", "4", "--num-iters", "1")
    result = bench("startup", *args, "--json", "out.json")
    assert result.exit_code == 0, result.output
    lines = [line.split()[0] for line in result.stdout.splitlines() if line.strip()]
    assert lines[-5:] == ["process", "import", "load", "first", "total"]
    figures = read("out.json")["figures"]
    assert set(figures) == {"cold", "warm"}
    assert figures["cold"]["total_s"] == pytest.approx(sum(figures["cold"]["parts_s"].values()))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--plot", "p.pdf"), "must end in .png or .svg"),
        (("--plot", "none/p.png"), "does not exist"),
        (("--json", "none/o.json"), "does not exist"),
        (("--json", "."), "is a directory"),
        (("--input-len", "0"), "Invalid value for '--input-len'"),
        (("--output-len", "x"), "Invalid value for '--output-len'"),
        (("--num-prompts", "-1"), "Invalid value for '--num-prompts'"),
        (("--num-iters", "0"), "Invalid value for '--num-iters'"),
        (("--num-warmups", "-1"), "Invalid value for '--num-warmups'"),
        (("--seed", "-1"), "Invalid value for '--seed'"),
        (("--temperature", "-0.1"), "Invalid value for '--temperature'"),
        (("--temperature", "nan"), "not a finite number"),
        (("--temperature", "inf"), "not a finite number"),
        (("--engine", "sglang"), "'sglang' is not one of 'enginebay', 'vllm', 'transformers', 'llama-cpp'"),
        (("--engine", "vllm", "--peer-python", "no/python"), "does not exist"),
        (("--peer-python", sys.executable), "--peer-python is for a peer"),
    ],
)
def test_bad_values_are_usage_errors(bench: Run, args: tuple[str, ...], words: str) -> None:
    result = bench("throughput", *args)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


@pytest.mark.parametrize("option", ["--batch-size", "--num-prompts"])
def test_options_of_other_commands_are_not_swallowed(bench: Run, option: str) -> None:
    other = {"--batch-size": "throughput", "--num-prompts": "latency"}[option]
    assert f"No such option '{option}'" in bench(other, option, "1").stderr.replace(":", "")


def test_what_does_not_fit_is_the_engines_message(bench: Run) -> None:
    result = bench("throughput", "--input-len", "60", "--output-len", "40")
    assert result.exit_code == 1
    assert "max_model_len is 64" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_setting_that_a_peer_cannot_honour(bench: Run) -> None:
    result = bench("latency", "--engine", "transformers", "--set", "scheduler.policy=fcfs")
    assert result.exit_code == 1
    assert "transformers cannot honour scheduler.policy" in result.stderr


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is here")
def test_a_missing_peer(bench: Run) -> None:
    result = bench("latency", "--engine", "vllm")
    assert result.exit_code == 1
    assert "pip install vllm" in result.stderr


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(bench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginebay.bench.plot.importlib.util.find_spec", lambda _: None)
    result = bench("throughput", "--plot", "p.png")
    assert result.exit_code == 1
    assert "enginebay[bench]" in result.stderr


@pytest.mark.parametrize("command", ["throughput", "latency", "startup"])
def test_help(bench: Run, command: str) -> None:
    shown = CliRunner().invoke(cli, ["bench", command, "--help"]).output
    for option in (
        "--input-len",
        "--seed",
        "--num-iters",
        "--temperature",
        "--engine",
        "--peer-python",
        "--json",
        "--plot",
    ):
        assert option in shown
