"""Warm-up runs and measured runs of one engine. It knows no figures and no screen."""

from __future__ import annotations

from collections.abc import Callable

from enginebay.bench.process import EngineProcess, RunResult
from enginebay.bench.workload import Workload

#: (what is going on, tokens of all runs so far)
Progress = Callable[[str, int], None]


def measure(
    engine: EngineProcess, work: Workload, *, num_warmups: int, num_iters: int, progress: Progress
) -> list[RunResult]:
    """Run `work` `num_warmups` times unmeasured, then `num_iters` times; return the latter."""
    runs: list[RunResult] = []
    for number in range(num_warmups + num_iters):
        measured = number - num_warmups + 1
        what = f"run {measured}/{num_iters}" if measured > 0 else f"warm-up {number + 1}/{num_warmups}"
        before = number * work.num_output_tokens
        progress(what, before)
        run = engine.run(work, lambda done, what=what, before=before: progress(what, before + done))  # type: ignore[misc]
        if measured > 0:
            runs.append(run)
    progress("done", (num_warmups + num_iters) * work.num_output_tokens)
    return runs
