from __future__ import annotations

import json
from pathlib import Path

import pytest
from enginebay.bench.document import document, hardware, write_json
from enginebay.bench.process import BenchError, EngineJob, Ready
from enginebay.bench.show import print_document

JOB = EngineJob("vllm", "/x/python", {"model": "m", "loaded": "secret bytes"}, {})
READY = Ready({"load": 1.0}, {"python": "3.12.1", "vllm": "0.9"}, ["GPU"], {"dtype": "bfloat16"})


def test_a_figure_has_everything_beside_it(tmp_path: Path) -> None:
    data = document("latency", {"batch_size": 1}, JOB, READY, {"seconds": [1.0]})
    write_json(tmp_path / "x.json", data)
    read = json.loads((tmp_path / "x.json").read_text())
    assert read == data
    assert read["schema"] == "enginebay.bench/1"
    assert set(read) == {"schema", "command", "date", "workload", "engine", "versions", "hardware", "figures"}
    assert read["engine"] == {
        "name": "vllm",
        "python": "/x/python",
        "settings": {"model": "m"},
        "start_s": {"load": 1.0},
        "dtype": "bfloat16",
    }
    assert read["versions"]["vllm"] == "0.9"
    assert read["hardware"]["gpus"] == ["GPU"]


def test_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2,1")
    found = hardware()
    assert found["usable_cpus"] >= 1
    assert found["memory_bytes"] > 2**28
    assert found["omp_num_threads"] == "2,1"


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"--json .* cannot be written"):
        write_json(tmp_path / "none" / "x.json", {})


def test_the_table_of_starts(capsys: pytest.CaptureFixture[str]) -> None:
    kind = {"total_s": 3.5, "parts_s": {"load": 3.0, "first_token": 0.5}, "starts": []}
    print_document(document("startup", {}, JOB, READY, {"cold": kind, "warm": kind}))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["first", "token", "0.500", "0.500"] in lines
    assert ["total", "3.500", "3.500"] in lines
