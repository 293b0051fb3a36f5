"""The fused kernels beside torch's parts: equal first, then time, bandwidth, and share of what a copy reaches.

    python benchmarks/gpu/fused.py [--only silu] [--out DIR]

Times are inside CUDA graphs, the two ways taking turns; at one token also launched eagerly, where the host's part counts.
``--dry`` runs small sizes on a CPU, where the fused operations take torch's way, to prove the script.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fused_ops import OPERATIONS, Operation, Sizes, worst_error
from measuring import BEYOND_L2, Budget, Report, alternating, copy_bandwidth, eager_latency, ratio, synchronize

SMALL = Sizes(width=64, mlp=48, heads=4, kv_heads=2, head_dim=16)


def measure(report: Report, operation: Operation, tokens: int, copy: float, rounds: int) -> None:
    """One row, of a fused operation that equals its parts."""
    error = worst_error(operation)
    synchronize()
    name = f"{operation.name}, {tokens} tokens"
    if not error <= 1:
        report.failure(name, f"{error} of the difference from torch's parts that is allowed")
        return
    calls = max(operation.copies, 8)
    runs = {"fused": repeated(operation.fused, operation.copies, calls)}
    runs["parts"] = repeated(operation.parts, operation.copies, calls)
    times = alternating(runs, calls=calls, rounds=rounds)
    fused = median(times["fused"])
    bandwidth = operation.num_bytes / fused / 1e3
    values: dict[str, Any] = {
        "fused_us": round(fused, 2),
        "parts_us": round(median(times["parts"]), 2),
        "of_parts": ratio(times, "fused", "parts"),
        "gb_per_s": round(bandwidth, 1),
        "of_copy": round(bandwidth / copy, 3),
        "difference": round(error, 3),
    }
    if tokens == 1:
        for way, function in (("fused", operation.fused), ("parts", operation.parts)):
            values[f"{way}_eager_us"] = round(eager_latency(lambda f=function: f(0)), 2)  # type: ignore[misc]
    report.row(name, **values)


def repeated(function: Callable[[int], Any], copies: int, calls: int) -> Callable[[], None]:
    """`calls` calls that go through the copies."""

    def run() -> None:
        for i in range(calls):
            function(i % copies)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--only", help="operations whose name holds this")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 256, 4096])
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--dry", action="store_true", help="small, on a CPU; figures mean nothing")
    args = parser.parse_args()
    report, budget = Report(args.out, "fused"), Budget(args.seconds)
    report.machine()
    device, dtype = ("cpu", torch.float16) if args.dry else ("cuda", torch.bfloat16)
    copy = 1.0 if args.dry else copy_bandwidth()
    report.row("copy bandwidth", gb_per_s=round(copy, 1))
    for tokens in [1, 33] if args.dry else args.tokens:
        for make in OPERATIONS:
            if budget.spent:
                report.row("stopped", reason="time is up", at=f"{tokens} tokens")
                sys.exit(min(report.failures, 100))
            sizes, beyond = (SMALL, 1 << 16) if args.dry else (Sizes(), BEYOND_L2)
            torch.manual_seed(0)
            try:
                with torch.inference_mode():
                    operation = make(tokens, sizes, dtype, torch.device(device), beyond)
                    if args.only is None or args.only in operation.name:
                        measure(report, operation, tokens, copy, 2 if args.dry else args.rounds)
            except Exception:
                report.failure(f"an operation at {tokens} tokens", traceback.format_exc())
    sys.exit(min(report.failures, 100))


if __name__ == "__main__":
    main()
