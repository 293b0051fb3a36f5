"""Cold and warm starts, each in a fresh process, with its parts.

A cold start finds the model's files out of the page cache, as far as the system lets them go, and every cache of
compiled code empty; the warm start that follows finds what the cold one left. The user's own caches are not touched.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from enginebay.bench.process import EngineJob, EngineProcess, Ready
from enginebay.bench.workload import Workload
from enginebay.models.catalogue import cache_dir

#: where engines keep compiled code: variable -> folder within the benchmark's own cache
_CACHES = {
    "ENGINEBAY_CACHE": "enginebay",
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
}


def measure_starts(
    job: EngineJob, work: Workload, files: Iterable[Path], num_iters: int, on_start: Callable[[str], None]
) -> tuple[dict[str, list[dict[str, float]]], Ready]:
    """Start `num_iters` times cold and as often warm.

    Parameters
    ----------
    work
        What is run to its first token in each process.
    files
        The model's files.
    on_start
        Called before each start with what it is, e.g. ``"cold start 1/3"``.

    Returns
    -------
    tuple
        ``{"cold": […], "warm": […]}``, for each start part -> seconds; and what the last engine said of itself.
    """
    files = list(files)
    starts: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for number in range(1, num_iters + 1):
        with tempfile.TemporaryDirectory() as folder:
            fresh = replace(job, env={**job.env, **fresh_caches(Path(folder))})
            for path in files:
                forget(path)
            for kind, each in starts.items():
                on_start(f"{kind} start {number}/{num_iters}")
                with EngineProcess(fresh) as engine:
                    parts = dict(engine.ready.parts)
                    parts["first_token"] = engine.run(work).times[0][0]
                each.append(parts)
    return starts, engine.ready


def fresh_caches(folder: Path) -> dict[str, str]:
    """Variables that put caches of compiled code into `folder`; our models stay where they are."""
    paths = {variable: folder / name for variable, name in _CACHES.items()}
    for path in paths.values():
        path.mkdir()
    (paths["ENGINEBAY_CACHE"] / "models").symlink_to(cache_dir() / "models")
    return {variable: str(path) for variable, path in paths.items()}


def forget(path: Path) -> None:
    """Ask the system to drop a file's pages; where there is no such call, they stay."""
    if not hasattr(os, "posix_fadvise"):
        return
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
