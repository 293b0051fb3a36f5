"""`cpu.py --peers`: us and peers in one run, each started once and kept, taking turns on the same bytes.

The engines run through `enginebay.bench`'s driver, as in ``enginebay bench``. Turns alternate in order, so that a machine
that slows down slows everybody. Before each run an engine's prefix cache is emptied. Every engine is given the environment's
``OMP_NUM_THREADS``; set it to the processors that the machine really has.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from enginebay.bench.document import hardware
from enginebay.bench.engines import PEERS, engine_job, peer_job, require
from enginebay.bench.figures import first_token_times, inter_token_times
from enginebay.bench.process import EngineJob, EngineProcess, RunResult
from enginebay.bench.show import print_table
from enginebay.bench.workload import Workload
from enginebay.config import load_config
from peer_models import peer_model
from workloads import get

#: tokens of a request in all three works, with room
MAX_MODEL_LEN = 1024


def parse_peers(text: str) -> dict[str, str]:
    """``vllm=/path/python,transformers=…`` as a mapping."""
    peers = {}
    for item in text.split(","):
        name, equals, python = item.partition("=")
        if name not in PEERS or not equals or not python or name in peers:
            raise argparse.ArgumentTypeError(f"{item!r}: expected NAME=PYTHON, each of {', '.join(PEERS)} at most once")
        # The engines start elsewhere, so a relative path must be made whole here; links stay, or a venv would be left.
        peers[name] = os.path.abspath(os.path.expanduser(python)) if os.sep in python else python
    return peers


def compare(model: str, dtype: str, runs: int, works: Sequence[str], peers: dict[str, str]) -> None:
    """Measure everybody on every work, print one table, and the figures as JSON."""
    jobs = [engine_job("enginebay", load_config(overrides=ours(model, dtype)))]
    jobs += [job_of(name, python, model, dtype) for name, python in peers.items()]
    workloads = {name: Workload(prompts=prompts, lengths=lengths) for name in works for prompts, lengths in [get(name)]}
    with ExitStack() as stack:
        engines = {job.engine: stack.enter_context(EngineProcess(job)) for job in jobs}
        results = {name: take_turns(list(engines.values()), work, runs) for name, work in workloads.items()}
        versions = {name: engine.ready.versions for name, engine in engines.items()}
    rows = {engine: {name: figures(workloads[name], results[name][engine]) for name in workloads} for engine in engines}
    print_rows(rows, workloads)
    print(json.dumps({"hardware": hardware(), "versions": versions, "dtype": dtype, "figures": rows}, indent=1))


def ours(model: str, dtype: str) -> dict[str, Any]:
    return {"model": model, "dtype": dtype, "device": "cpu", "max_model_len": MAX_MODEL_LEN}


def job_of(name: str, python: str, model: str, dtype: str) -> EngineJob:
    """A peer on the same weights; llama.cpp has its dtype from its file, which is bfloat16."""
    peer = PEERS[name]
    require(peer, python)
    files = peer_model(model, peer.reads[0])
    if name == "llama-cpp":
        if dtype != "bfloat16":
            raise SystemExit("llama-cpp is compared in bfloat16 only: its dtype is its file's")
        return peer_job(peer, python, files)
    if name == "transformers":
        return peer_job(peer, python, files, dtype=dtype)
    # vLLM would keep a processor for itself, and 92 % of memory for a cache that 1 % fills
    threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    binding = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    job = peer_job(peer, python, files, dtype=dtype, max_model_len=MAX_MODEL_LEN, gpu_memory_utilization=0.3)
    return replace(job, env={"VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", binding)})


def take_turns(engines: Sequence[EngineProcess], work: Workload, runs: int) -> dict[str, list[RunResult]]:
    """One warm-up each, then `runs` rounds, every other one backwards."""
    results: dict[str, list[RunResult]] = {engine.job.engine: [] for engine in engines}
    for engine in engines:
        engine.run(work)
    for number in range(runs):
        for engine in engines if number % 2 == 0 else reversed(engines):
            results[engine.job.engine].append(engine.run(work))
    return results


def figures(work: Workload, runs: Sequence[RunResult]) -> dict[str, Any]:
    seconds = [run.seconds for run in runs]
    return {
        "seconds": seconds,
        "out_tokens_per_s": work.num_output_tokens / statistics.median(seconds),
        "ms_per_token": 1000 * statistics.median(inter_token_times(runs)),
        "first_token_ms": 1000 * statistics.median(first_token_times(runs)),
    }


def print_rows(rows: dict[str, dict[str, dict[str, Any]]], works: dict[str, Workload]) -> None:
    """A line for each work and engine."""
    lines = [
        (
            work,
            engine,
            f"{by_work[work]['out_tokens_per_s']:.1f}",
            f"{by_work[work]['ms_per_token']:.2f}",
            f"{by_work[work]['first_token_ms']:.0f}",
            f"{statistics.median(by_work[work]['seconds']):.2f}",
        )
        for work in works
        for engine, by_work in rows.items()
    ]
    print_table(("engine", "out tok/s", "ms a token", "TTFT ms", "seconds"), lines)
