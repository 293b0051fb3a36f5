from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from enginebay.bench.engines import NAMES, PEERS, engine_job, model_files_of, peer_job, require
from enginebay.bench.process import BenchError
from enginebay.cli.bench import _ENGINES
from enginebay.config import EngineConfig, LoadedConfig, load_config
from enginebay.models.reference import ModelFiles

Load = Callable[..., LoadedConfig]
ABSENT = PEERS["llama-cpp"]


def test_the_command_line_offers_every_engine() -> None:
    assert _ENGINES == NAMES


@pytest.mark.parametrize("peer", PEERS.values(), ids=lambda peer: peer.name)
def test_every_honoured_setting_exists(peer: object) -> None:
    values = EngineConfig().model_dump()
    for path in PEERS[getattr(peer, "name")].honoured:  # noqa: B009 - the parameter is an object to pytest
        section, _, key = path.rpartition(".")
        assert key in (values[section] if section else values), path


def test_ours_says_what_was_written(loaded: Load) -> None:
    job = engine_job("enginebay", loaded("scheduler.max_num_seqs=3", "attention.backend=torch"))
    assert job.python == sys.executable
    assert job.settings["written"]["scheduler.max_num_seqs"] == 3
    assert job.settings["written"]["load_format"] == "dummy"
    assert "device" not in job.settings["written"]


def test_a_peer_takes_what_was_written_by_its_own_names(loaded: Load, tiny_model: Path) -> None:
    job = engine_job("transformers", loaded("scheduler.max_num_seqs=3", "device=cpu"))
    assert job.settings == {
        "model": str(tiny_model),
        "dtype": "float32",
        "device": "cpu",
        "load_format": "dummy",
        "max_num_seqs": 3,
        "max_num_batched_tokens": None,
    }


def test_vllm_gets_its_limits_as_arguments(tiny_model: Path) -> None:
    files = ModelFiles(kind="hf_dir", path=tiny_model, name="tiny")
    job = peer_job(PEERS["vllm"], "python", files, dtype="bfloat16", max_model_len=64, enable_prefix_caching=False)
    assert job.settings["options"] == {"load_format": "auto", "max_model_len": 64, "enable_prefix_caching": False}
    assert job.settings["dtype"] == "bfloat16"


def test_what_a_peer_cannot_honour_is_refused_by_name_and_place(loaded: Load) -> None:
    with pytest.raises(
        BenchError, match=r"transformers cannot honour scheduler\.policy \(--set .*\), cache\.num_blocks"
    ):
        engine_job("transformers", loaded("scheduler.policy=fcfs", "cache.num_blocks=9"))


def test_a_load_format_that_a_peer_lacks(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginebay.bench.engines.require", lambda *_: None)
    with pytest.raises(BenchError, match="llama-cpp has no load_format dummy"):
        engine_job("llama-cpp", load_config(overrides=[f"model={tiny_model}", "load_format=dummy"], env={}))
    with pytest.raises(BenchError, match=r"llama-cpp reads a \.gguf file, and .* is not one"):
        engine_job("llama-cpp", load_config(overrides=[f"model={tiny_model}"], env={}))


def test_a_missing_peer_names_its_pip_line() -> None:
    missing = type(ABSENT)(
        name="absent",
        module="enginebay_no_such_peer",
        install="pip install absent",
        honoured={},
        load_formats=("auto",),
        reads=("gguf",),
    )
    with pytest.raises(BenchError, match=r"needs the package enginebay_no_such_peer, which .*: pip install absent; or"):
        require(missing, sys.executable)
    require(PEERS["transformers"], sys.executable)


def test_an_interpreter_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot be started"):
        require(ABSENT, str(tmp_path / "python"))


def test_files_of_a_folder(loaded: Load, tiny_model: Path) -> None:
    assert tiny_model / "model.safetensors" in model_files_of(loaded())
