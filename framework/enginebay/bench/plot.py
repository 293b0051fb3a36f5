"""Plots as PNG or SVG, by matplotlib, which the ``bench`` extra brings. It is imported when a plot is asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginebay.bench.figures import first_token_times, inter_token_times
from enginebay.bench.process import BenchError, RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")


def require_matplotlib() -> None:
    """Raise `BenchError` where matplotlib is missing, before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--plot needs matplotlib, which the extra [bench] brings: pip install 'enginebay[bench]'")


def plot_runs(path: Path, data: dict[str, Any], runs: Sequence[RunResult]) -> None:
    """Output tokens over time, and the distributions of first-token and inter-token times.

    Parameters
    ----------
    path
        Ends in one of `SUFFIXES`.
    data
        A document of `enginebay.bench.document`, for the title.
    """
    figure, (over_time, first, between) = _figure(data, 3)
    for number, run in enumerate(runs, start=1):
        arrivals = sorted(when for row in run.times for when in row)
        over_time.plot(arrivals, range(1, len(arrivals) + 1), label=f"run {number}", linewidth=1)
    over_time.set(title="output tokens", xlabel="seconds", ylabel="tokens so far")
    over_time.legend(fontsize=7)
    _histogram(first, first_token_times(runs), "first token (TTFT)")
    _histogram(between, inter_token_times(runs), "between tokens")
    _save(figure, path)


def plot_starts(path: Path, data: dict[str, Any]) -> None:
    """A bar for each start, its parts stacked."""
    figure, (axes,) = _figure(data, 1)
    bars = [(kind, i, parts) for kind, of in data["figures"].items() for i, parts in enumerate(of["starts"], start=1)]
    bottoms = [0.0] * len(bars)
    for name in bars[0][2]:
        heights = [parts[name] for _, _, parts in bars]
        axes.bar([f"{kind} {i}" for kind, i, _ in bars], heights, bottom=bottoms, label=name.replace("_", " "))
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set(ylabel="seconds")
    axes.legend(fontsize=7)
    _save(figure, path)


def _histogram(axes: Axes, seconds: Sequence[float], title: str) -> None:
    axes.set(title=title, xlabel="ms", ylabel="count")
    if not seconds:
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center")
        return
    values = sorted(1000 * s for s in seconds)
    axes.hist(values, bins=min(40, max(5, len(values) // 4)))
    for share, style in ((0.5, "-"), (0.9, "--"), (0.99, ":")):
        at = values[min(len(values) - 1, int(share * len(values)))]
        axes.axvline(at, color="black", linestyle=style, linewidth=0.8, label=f"p{share * 100:.0f} {at:.2f}")
    axes.legend(fontsize=7)


def _figure(data: dict[str, Any], columns: int) -> tuple[Figure, Sequence[Axes]]:
    """A figure without a window system, titled with what was measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * columns + 0.6, 3.6), layout="constrained")
    work = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in data["workload"].items())
    figure.suptitle(f"{data['command']}, {data['engine']['name']}: {work}", fontsize=9)
    axes = figure.subplots(1, columns, squeeze=False)
    return figure, list(axes[0])


def _save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise BenchError(f"--plot {path} cannot be written: {error}") from error
