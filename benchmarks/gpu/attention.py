"""Attention backends on a GPU: right first, then fast; every row is printed and written as it is known.

    python benchmarks/gpu/attention.py [--only checks|shared_caches|speed|sweep] [--backends triton flashinfer] [--out DIR]
    python benchmarks/gpu/attention.py --tune triton-decode

It (1) runs a pairwise choice of features of each backend against float32, (2) lets every two backends share one cache, and
(3) times each through the engine's seam beside the libraries' own calls. ``--tune`` times our Triton kernels under other
tile sizes. ``--dry`` does all of it small, on a CPU, to prove the script: set ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from attention_cases import FEATURES, LAYOUTS, PLUGINS, SMALL_FEATURES, chosen_cases, grouped, record_of
from attention_checks import check, check_pair, pairs
from attention_jobs import Result, run_jobs
from attention_speed import SMALL, SWEEP, TARGETS, run_shapes
from enginebay.conformance.attention.trial import passed
from enginebay.plugins.requirements import Hardware
from measuring import Budget, Report, copy_bandwidth

#: cases of a job: few enough to spread, enough to pay for a process's start
JOB_SIZE = 9


class Run:
    """What the command line says."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.dry: bool = args.dry
        self.report = Report(args.out, "attention")
        self.device = torch.device("cpu" if self.dry else "cuda")
        # records speak of GPUs; their kernels run on a CPU under the interpreter
        capability = (9, 0) if self.dry else torch.cuda.get_device_capability()
        self.hardware = Hardware(device="cuda", capability=capability)
        self.dtype = torch.float16 if self.dry else torch.bfloat16
        self.backends: list[str] = [name for name in args.backends if self._installed(name)]

    def _installed(self, name: str) -> bool:
        try:
            record_of(name)
        except ImportError as error:
            self.report.row(f"{name}: left out", reason=str(error))
            return False
        return True


def checks(run: Run) -> None:
    """Every chosen case in one of several processes; a row a backend, and one a failure."""
    args = run.args
    features = SMALL_FEATURES if run.dry else FEATURES
    cases = [
        case for name in run.backends for case in chosen_cases(name, run.hardware, features, args.flashinfer_variants)
    ]
    # what compiles longest starts first
    jobs = sorted(grouped(cases, JOB_SIZE), key=lambda job: job[0].backend != "flashinfer")
    found: dict[str, list[Result]] = collections.defaultdict(list)
    for result in run_jobs(jobs, check, run.device.type, args.processes, Budget(args.check_seconds)):
        found[result.case.backend].append(result)
        if result.error is not None:
            run.report.failure(f"case {result.case.backend}: {result.case}", result.error)
        elif not result.unfinished and not passed(result.values):
            run.report.failure(f"case {result.case.backend}: {result.case}", str(result.values))
    for name in run.backends:
        run.report.row(f"checks {name}", **_summary(found[name]))


def _summary(results: list[Result]) -> dict[str, Any]:
    ran = [r for r in results if r.values]
    worst = max(ran, key=lambda r: r.values["of_tolerance"], default=None)
    return {
        "cases": len(results),
        "passed": sum(passed(r.values) for r in ran),
        "wrong": [str(r.case) for r in ran if not passed(r.values)],
        "errors": [str(r.case) for r in results if r.error],
        "unfinished": [str(r.case) for r in results if r.unfinished],
        "worst_error": max((r.values["error"] for r in ran), default=None),
        "worst_lse_error": max((r.values.get("lse_error", 0.0) for r in ran), default=None),
        "closest_to_tolerance": None if worst is None else {"case": str(worst.case), **worst.values},
    }


def shared_caches(run: Run) -> None:
    """Prompts through one backend, the tokens after them through another."""
    for head_dim in (64,) if run.dry else (128, 64):
        dtype = str(run.dtype).removeprefix("torch.")
        for prefill, decode, layout, block_size in pairs(run.backends, run.hardware, dtype, head_dim):
            name = f"prefill {prefill}, decode {decode}, {layout.name}, block {block_size}, head {head_dim}"
            try:
                values = check_pair(
                    prefill, decode, layout, block_size, dtype=run.dtype, head_dim=head_dim, device=run.device.type
                )
            except Exception:
                run.report.failure(name, traceback.format_exc())
                continue
            if passed(values):
                run.report.row(f"pair {name}", **values)
            else:
                run.report.failure(name, str(values))


def speed(run: Run) -> None:
    """The shapes that have a figure to reach."""
    if not run.dry:
        run.report.row("copy bandwidth", gb_per_s=round(copy_bandwidth(), 1))
    _shapes(run, SMALL if run.dry else TARGETS)


def sweep(run: Run) -> None:
    """The other shapes."""
    if not run.dry:
        _shapes(run, SWEEP)


def _shapes(run: Run, shapes: tuple[Any, ...]) -> None:
    run_shapes(
        run.report,
        shapes,
        run.backends,
        Budget(run.args.seconds),
        hardware=run.hardware,
        device=run.device,
        dtype=run.dtype,
        layout=LAYOUTS[run.args.layout],
        rounds=2 if run.dry else run.args.rounds,
        beyond=1 << 20 if run.dry else 256 << 20,
    )


def tune(run: Run) -> None:
    """Tile sizes of our own kernels; imports them, so it stands apart."""
    from attention_tuning import tune_kernel

    tune_kernel(
        run.args.tune,
        run.report,
        Budget(run.args.seconds),
        dry=run.dry,
        processes=run.args.processes,
        layout=LAYOUTS[run.args.layout],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument(
        "--only", help="run the stages whose function's name holds this: checks, shared_caches, speed, sweep"
    )
    parser.add_argument("--backends", nargs="+", default=list(PLUGINS), choices=list(PLUGINS))
    parser.add_argument("--layout", choices=list(LAYOUTS), default="NHD", help="of the speed stages")
    parser.add_argument("--seconds", type=float, default=120, help="of each speed stage")
    parser.add_argument("--check-seconds", type=float, default=180, help="of the checks")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=30, help="figures a contender")
    parser.add_argument(
        "--flashinfer-variants", type=int, default=None, help="how many of its kernels to check; 2 compile nothing"
    )
    parser.add_argument("--tune", choices=["triton-decode", "triton-prefill"])
    parser.add_argument("--dry", action="store_true", help="small, on a CPU; figures mean nothing")
    args = parser.parse_args()
    if args.dry:
        if os.environ.get("TRITON_INTERPRET") != "1":
            parser.error("--dry needs TRITON_INTERPRET=1")
        args.backends = [name for name in args.backends if name in ("torch", "triton")]
    run = Run(args)
    run.report.machine()
    stages: list[Callable[[Run], None]] = [tune] if args.tune else [checks, shared_caches, speed, sweep]
    for stage in stages:
        if args.only and args.only not in stage.__name__:
            continue
        try:
            with torch.inference_mode():
                stage(run)
        except Exception:
            run.report.failure(stage.__name__, traceback.format_exc())
    sys.exit(min(run.report.failures, 100))


if __name__ == "__main__":
    main()
