"""The JSON of a benchmark: its versioned schema, and the machine that it ran on. It measures nothing.

``schema`` names the form. A key is added under the same name; one that changes its meaning or goes away raises the
number.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginebay import __version__
from enginebay.bench.process import BenchError

if TYPE_CHECKING:
    from enginebay.bench.process import EngineJob, Ready

SCHEMA = "enginebay.bench/1"


def document(
    command: str, workload: dict[str, Any], job: EngineJob, ready: Ready, figures: dict[str, Any]
) -> dict[str, Any]:
    """Everything that makes a figure mean something, beside it."""
    settings = {key: value for key, value in job.settings.items() if key != "loaded"}
    return {
        "schema": SCHEMA,
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "workload": workload,
        "engine": {
            "name": job.engine,
            "python": job.python,
            "settings": settings,
            "start_s": ready.parts,
            **ready.facts,
        },
        "versions": {"measured_by": __version__, **ready.versions},
        "hardware": {**hardware(), "gpus": ready.gpus},
        "figures": figures,
    }


def hardware() -> dict[str, Any]:
    """The processor and memory of this machine, and what bounds threads."""
    return {
        "cpu": _cpu_name(),
        "architecture": platform.machine(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "system": platform.platform(),
    }


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write a document. Raises `BenchError` where the file cannot be written."""
    try:
        path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--json {path} cannot be written: {error}") from error


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
