from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from enginebay.bench.engines import engine_job, model_files_of
from enginebay.bench.startup import forget, fresh_caches, measure_starts
from enginebay.bench.workload import Workload
from enginebay.config import LoadedConfig
from enginebay.models.catalogue import cache_dir


def test_cold_and_warm_starts_in_turn(loaded: Callable[..., LoadedConfig]) -> None:
    config, told = loaded(), list[str]()
    work = Workload(prompts=[[1, 2, 3]], lengths=[1])
    starts, ready = measure_starts(engine_job("transformers", config), work, model_files_of(config), 1, told.append)
    assert told == ["cold start 1/1", "warm start 1/1"]
    for kind in ("cold", "warm"):
        assert [list(parts) for parts in starts[kind]] == [["process", "import", "load", "first_token"]]
        assert min(starts[kind][0].values()) > 0
    assert ready.facts["dtype"] == "float32"


def test_fresh_caches_are_empty_but_for_our_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINEBAY_CACHE", str(tmp_path / "mine"))
    (tmp_path / "mine" / "models" / "m").mkdir(parents=True)
    (tmp_path / "fresh").mkdir()
    for name, value in fresh_caches(tmp_path / "fresh").items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == tmp_path / "fresh" / "enginebay"
    assert os.listdir(cache_dir()) == ["models"]
    assert os.listdir(cache_dir() / "models") == ["m"]
    assert os.listdir(os.environ["VLLM_CACHE_ROOT"]) == []


def test_forgetting_keeps_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 10_000)
    forget(tmp_path / "f")
    forget(tmp_path / "gone")
    assert (tmp_path / "f").read_bytes() == b"x" * 10_000
