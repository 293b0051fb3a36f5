"""What the GPU scripts share: rows written as they are known, a time budget, and times of alternating contenders."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from enginebay.conformance.cuda import capture

#: bytes of caches that a graph goes through: more than any second-level cache keeps (50 MiB on Hopper)
BEYOND_L2 = 256 << 20
#: rounds run this long before any counts, so that the clock has settled
WARM_SECONDS = 0.2
Contenders = Mapping[str, Callable[[], None]]


class Report:
    """Rows: printed as JSON lines and appended to a file at once, so that a run that is cut short leaves what it has."""

    def __init__(self, out: Path, name: str) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._file = out / f"{name}.jsonl"
        self.failures = 0

    def row(self, name: str, **values: Any) -> None:
        line = json.dumps({"row": name, **values})
        print(line, flush=True)
        with self._file.open("a") as file:
            file.write(line + "\n")

    def failure(self, name: str, error: str) -> None:
        """A row that makes the script's exit status non-zero."""
        self.failures += 1
        self.row(f"FAILED {name}", error=error[-1500:])

    def machine(self) -> None:
        import triton

        card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        self.row(
            "machine", card=card, torch=torch.__version__, triton=triton.__version__, date=time.strftime("%Y-%m-%d")
        )


class Budget:
    """Seconds that a sweep may take; it stops before the part that would begin after them."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    @property
    def spent(self) -> bool:
        return self.left <= 0


def alternating(contenders: Contenders, *, calls: int, rounds: int = 30, graphs: bool = True) -> dict[str, list[float]]:
    """Microseconds a call of each contender, one figure a round; contenders take turns within a round.

    Parameters
    ----------
    contenders
        Each makes `calls` calls of what is measured.
    calls
        What a time is divided by.
    rounds
        Figures; those of the first `WARM_SECONDS` are thrown away.
    graphs
        Capture each contender in a CUDA graph; else each is launched eagerly, behind a wait long enough for its launches.
        Without a GPU this has no effect, and the figure is wall time.
    """
    if not torch.cuda.is_available():
        return {name: [_wall(work) * 1e6 / calls for _ in range(rounds)] for name, work in contenders.items()}
    for work in contenders.values():
        work()
    torch.cuda.synchronize()
    runs = {name: capture(work).replay if graphs else work for name, work in contenders.items()}
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    times: dict[str, list[float]] = {name: [] for name in runs}
    warm = time.monotonic() + WARM_SECONDS
    turn = 0
    while turn < rounds:
        is_warm = time.monotonic() > warm
        # every other round goes backwards, so that no contender always follows the same one
        for name in list(runs) if turn % 2 else list(reversed(runs)):
            if not graphs:
                torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
            events[0].record()
            runs[name]()
            events[1].record()
            events[1].synchronize()
            if is_warm:
                times[name].append(events[0].elapsed_time(events[1]) * 1e3 / calls)
        turn += is_warm
    return times


def eager_latency(work: Callable[[], None], repeats: int = 200) -> float:
    """Microseconds a call without a graph, one after the other: the host's time where that is the longer."""
    for _ in range(10):
        work()
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize()
    return (time.perf_counter() - start) * 1e6 / repeats


def host_microseconds(work: Callable[[], None], repeats: int = 30) -> float:
    """Median time in which `work` returns to the host, the device being idle when it starts."""
    times = []
    for _ in range(repeats):
        synchronize()
        times.append(_wall(work) * 1e6)
    synchronize()
    return median(times)


def ratio(times: Mapping[str, list[float]], name: str, to: str) -> float:
    """Median over rounds of one contender's time to another's, so that a clock that drifts does not count."""
    return round(median(a / b for a, b in zip(times[name], times[to], strict=True)), 4)


def copy_bandwidth() -> float:
    """GB/s of a large device copy, read and write counted; outside graphs, where a copy is slower."""
    if not torch.cuda.is_available():
        return float("nan")
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        for _ in range(8):
            target.copy_(source)

    times = alternating({"copy": copy}, calls=8, graphs=False)
    return 2 * source.nbytes / median(times["copy"]) / 1e3


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _wall(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
