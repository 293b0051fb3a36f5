"""From times to figures: rates, percentiles, medians. Pure arithmetic; it knows no engine and prints nothing.

Inter-token times leave out the first token of a request, whose time is its TTFT. Tokens that one step gave together
(speculation) have one time, and so gaps of 0.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from enginebay.bench.process import RunResult
from enginebay.bench.workload import Workload

PERCENTILES = (50, 90, 99)


def distribution_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, p50, p90, p99 and extremes of times, in ms; None where there are none."""
    if not len(seconds):
        return None
    values = np.asarray(seconds, dtype=np.float64) * 1000
    out = {"mean": float(values.mean()), "min": float(values.min()), "max": float(values.max())}
    return out | {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}


def first_token_times(runs: Sequence[RunResult]) -> list[float]:
    """Seconds to the first token of every request of every run (TTFT)."""
    return [row[0] for run in runs for row in run.times]


def inter_token_times(runs: Sequence[RunResult]) -> list[float]:
    """Seconds between every two tokens that follow each other in a request."""
    return [later - earlier for run in runs for row in run.times for earlier, later in itertools.pairwise(row)]


def throughput_figures(work: Workload, runs: Sequence[RunResult]) -> dict[str, Any]:
    """Rates of the median run; times over all runs."""
    seconds = statistics.median(run.seconds for run in runs)
    return {
        "seconds": [run.seconds for run in runs],
        "requests_per_s": len(work.prompts) / seconds,
        "input_tokens_per_s": work.num_input_tokens / seconds,
        "output_tokens_per_s": work.num_output_tokens / seconds,
        "total_tokens_per_s": (work.num_input_tokens + work.num_output_tokens) / seconds,
        **_times(runs),
    }


def latency_figures(work: Workload, runs: Sequence[RunResult]) -> dict[str, Any]:
    """Times of a batch of equal requests."""
    return {
        "seconds": [run.seconds for run in runs],
        "batch_ms": distribution_ms([run.seconds for run in runs]),
        "output_tokens_per_s": work.num_output_tokens / statistics.median(run.seconds for run in runs),
        **_times(runs),
    }


def startup_figures(starts: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians of cold and warm starts.

    Parameters
    ----------
    starts
        ``"cold"`` and ``"warm"`` -> for each start: part -> seconds.
    """
    return {
        kind: {
            "total_s": statistics.median(sum(parts.values()) for parts in each),
            "parts_s": {name: statistics.median(parts[name] for parts in each) for name in each[0]},
            "starts": each,
        }
        for kind, each in starts.items()
    }


def _times(runs: Sequence[RunResult]) -> dict[str, Any]:
    """TTFT and inter-token times of all requests, and the most memory seen."""
    peaks = [run.peak_memory_bytes for run in runs if run.peak_memory_bytes is not None]
    return {
        "ttft_ms": distribution_ms(first_token_times(runs)),
        "inter_token_ms": distribution_ms(inter_token_times(runs)),
        "peak_memory_bytes": max(peaks, default=None),
    }
