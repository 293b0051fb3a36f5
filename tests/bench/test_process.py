"""The driver in a fresh process: our engine and transformers' for real, on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from enginebay.bench import driver
from enginebay.bench.engines import engine_job
from enginebay.bench.measure import measure
from enginebay.bench.process import BenchError, EngineJob, EngineProcess, RunResult
from enginebay.bench.workload import Workload, random_workload
from enginebay.config import LoadedConfig

Load = Callable[..., LoadedConfig]
UNEVEN = Workload(prompts=[[7, 8, 9], [7, 8, 9, 10, 11], [7, 1]], lengths=[4, 1, 6])


def check_times(result: RunResult, lengths: list[int]) -> None:
    assert [len(row) for row in result.times] == lengths
    for row in result.times:
        assert row == sorted(row)
        assert row[0] > 0
    assert result.seconds == max(map(max, result.times))


@pytest.mark.parametrize("engine", ["enginebay", "transformers"])
@pytest.mark.parametrize("more", [(), ("scheduler.max_num_seqs=2",)], ids=["together", "two at a time"])
def test_every_token_is_dated_and_no_end_token_ends_an_answer(loaded: Load, engine: str, more: tuple[str, ...]) -> None:
    parts: list[str] = []
    with EngineProcess(engine_job(engine, loaded(*more)), parts.append) as process:
        check_times(process.run(UNEVEN), UNEVEN.lengths)
        work = random_workload(2, 5, 40, vocab_size=97, seed=1, temperature=1.0)
        again = process.run(work)
        check_times(again, [40, 40])
    assert parts == list(process.ready.parts)
    assert parts == ["process", "import", *(["resolve"] if engine == "enginebay" else []), "load"]
    assert min(process.ready.parts.values()) > 0
    assert {"python", "torch", "transformers"} <= set(process.ready.versions)
    assert process.ready.facts["dtype"] == "float32"
    assert again.peak_memory_bytes is None or again.peak_memory_bytes > 50e6


def test_transformers_reads_weights(tiny_model: Path) -> None:
    settings = {"model": str(tiny_model), "dtype": "bfloat16", "device": "cpu", "load_format": "auto"}
    job = EngineJob("transformers", sys.executable, {**settings, "max_num_seqs": None}, {})
    with EngineProcess(job) as process:
        check_times(process.run(UNEVEN), UNEVEN.lengths)
    assert process.ready.facts["dtype"] == "bfloat16"


def test_runs_are_counted_and_progress_is_told(loaded: Load) -> None:
    told: list[tuple[str, int]] = []
    with EngineProcess(engine_job("enginebay", loaded())) as process:
        runs = measure(process, UNEVEN, num_warmups=1, num_iters=2, progress=lambda *now: told.append(now))
    assert len(runs) == 2
    whats = list(dict.fromkeys(what for what, _ in told))
    assert whats == ["warm-up 1/1", "run 1/2", "run 2/2", "done"]
    assert [done for _, done in told] == sorted(done for _, done in told)
    assert told[-1] == ("done", 3 * UNEVEN.num_output_tokens)


def test_our_errors_come_as_their_message(loaded: Load) -> None:
    with pytest.raises(BenchError, match=r"^enginebay: .*nothing_like_it"):
        EngineProcess(engine_job("enginebay", loaded("attention.backend=nothing_like_it")))
    with (
        EngineProcess(engine_job("enginebay", loaded("max_model_len=16"))) as process,
        pytest.raises(BenchError, match="max_model_len is 16"),
    ):
        process.run(Workload(prompts=[[1] * 20], lengths=[4]))


def test_a_crash_comes_with_what_was_said_last(tmp_path: Path) -> None:
    settings = {"model": str(tmp_path), "dtype": "auto", "device": "cpu", "load_format": "auto", "max_num_seqs": None}
    with pytest.raises(BenchError, match=r"transformers in .* ended with status 1; it said last:\n(.|\n)*config"):
        EngineProcess(EngineJob("transformers", sys.executable, settings, {}))


def test_an_engine_that_dies_between_runs(loaded: Load) -> None:
    with EngineProcess(engine_job("enginebay", loaded())) as process:
        process._process.kill()
        process._process.wait()
        with pytest.raises(BenchError, match="ended with status -9"):
            process.run(UNEVEN)


def test_the_driver_needs_the_standard_library_only() -> None:
    """A peer's environment has no enginebay: the driver must start without site packages, and shadow no module."""
    job = json.dumps({"engine": "llama-cpp", "spawned": 0})
    done = subprocess.run(
        [sys.executable, "-I", "-S", driver.__file__], input=job, capture_output=True, text=True, check=False
    )
    assert json.loads(done.stdout) == {"event": "part", "name": "process"}
    assert "No module named 'numpy'" in done.stderr


def test_the_common_prefix_leaves_each_prompt_a_token() -> None:
    assert driver._num_common([[1, 2, 3], [1, 2, 4]]) == 2
    assert driver._num_common([[1, 2], [1, 2, 4]]) == 1
    assert driver._num_common([[1, 2], [3, 2]]) == 0
