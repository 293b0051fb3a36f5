from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from enginebay.bench import plot
from enginebay.bench.process import BenchError, RunResult

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="the bench extra")
DATA: dict[str, Any] = {"command": "latency", "engine": {"name": "enginebay"}, "workload": {"batch_size": 2}}
PARTS = {"import": 1.0, "load": 2.0, "first_token": 0.1}
MAGIC = {".png": b"\x89PNG", ".svg": b"<?xml"}


def check(path: Path) -> None:
    assert path.read_bytes().startswith(MAGIC[path.suffix])
    assert path.stat().st_size > 3000


@needs_matplotlib
@pytest.mark.parametrize("suffix", plot.SUFFIXES)
@pytest.mark.parametrize("times", [[[0.1, 0.2, 0.4], [0.1, 0.3]], [[0.5]]], ids=["tokens", "one token"])
def test_plots_of_runs(tmp_path: Path, suffix: str, times: list[list[float]]) -> None:
    path = tmp_path / f"p{suffix}"
    plot.plot_runs(path, DATA, [RunResult(times, None), RunResult(times, None)])
    check(path)


@needs_matplotlib
@pytest.mark.parametrize("suffix", plot.SUFFIXES)
def test_plots_of_starts(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"p{suffix}"
    plot.plot_starts(path, {**DATA, "figures": {"cold": {"starts": [PARTS, PARTS]}, "warm": {"starts": [PARTS]}}})
    check(path)


@needs_matplotlib
def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot be written"):
        plot.plot_runs(tmp_path / "none" / "p.png", DATA, [RunResult([[0.5]], None)])


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BenchError, match=r"pip install 'enginebay\[bench\]'"):
        plot.require_matplotlib()
