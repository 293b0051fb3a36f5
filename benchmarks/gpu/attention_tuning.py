"""Our Triton kernels under other tile sizes, through the backend as it stands.

The function by which a launcher chooses its configuration is replaced by one that changes some of the fields; everything
else, buffers included, follows from what it returns. Variants are compiled in several processes first, which leave them in
Triton's cache on disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import multiprocessing
import pkgutil
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
from statistics import median
from typing import Any
from unittest import mock

import torch
from attention_cases import LAYOUTS
from attention_speed import SMALL, TARGETS, Shape, Work, decode, through_seam
from enginebay.plugins.records import KVLayout
from measuring import BEYOND_L2, Budget, Report, alternating
from torch import Tensor

PACKAGE = "enginebay_triton_attention"
Changes = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What is varied for a kernel, and on which shapes."""

    #: name of the function that returns the frozen configuration
    chooser: str
    #: values by field
    grid: Mapping[str, Sequence[Any]]
    shapes: tuple[Shape, ...]

    def variants(self) -> list[Changes]:
        """The grid's product."""
        return [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]


TUNINGS = {
    "triton-decode": Tuning(
        "decode_config",
        {"block_keys": (32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (2, 3, 4)},
        (decode(128, 1024), decode(1, 8192), decode(8, 1024), decode(32, 8192)),
    ),
    "triton-prefill": Tuning(
        "prefill_config",
        {"block_queries": (64, 128), "block_keys": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)},
        tuple(shape for shape in TARGETS if shape.phase == "prefill"),
    ),
}


@contextlib.contextmanager
def configured(chooser: str, changes: Changes) -> Iterator[None]:
    """Within it, the kernel's configuration has the fields of `changes`."""
    package = importlib.import_module(PACKAGE)
    modules = [importlib.import_module(f"{PACKAGE}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    holders = [module for module in modules if hasattr(module, chooser)]
    if not holders:
        raise LookupError(f"no module of {PACKAGE} has {chooser}")
    true = getattr(holders[0], chooser)

    def choose(*args: Any, **options: Any) -> Any:
        return dataclasses.replace(true(*args, **options), **changes)

    with contextlib.ExitStack() as stack:
        for module in holders:
            stack.enter_context(mock.patch.object(module, chooser, choose))
        yield


def compile_variant(name: str, shape: Shape, changes: Changes, layout: str, device: str) -> str:
    """Run a variant once, in a process of its own; what is wrong with it, or nothing."""
    try:
        with torch.inference_mode(), configured(TUNINGS[name].chooser, changes):
            work = Work(shape, torch.device(device), _dtype(device), LAYOUTS[layout], 1)
            through_seam("triton", work).attend(work.caches[0])
            if device == "cuda":
                torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def tune_kernel(
    name: str, report: Report, budget: Budget, *, dry: bool, processes: int, layout: KVLayout, rounds: int = 12
) -> None:
    """A row a shape and variant, and one with the best few of each shape.

    Parameters
    ----------
    name
        Of `TUNINGS`.
    dry
        Two variants, small, on a CPU.
    processes
        How many compile at a time.
    """
    tuning, device = TUNINGS[name], "cpu" if dry else "cuda"
    phase = tuning.shapes[0].phase
    shapes = [s for s in SMALL if s.phase == phase] if dry else tuning.shapes
    variants = tuning.variants()[:2] if dry else tuning.variants()
    usable = list(variants)
    for changes, fault in _compiled(name, shapes, variants, layout, device, processes, budget):
        if fault and changes in usable:
            usable.remove(changes)
            report.row(f"{name}: variant left out", **changes, fault=fault)
    for shape in shapes:
        if budget.spent:
            report.row(f"{name}: {shape.name}: not run", reason="time is up")
            continue
        work = Work(shape, torch.device(device), _dtype(device), layout, 1 << 16 if dry else BEYOND_L2)
        ranked = list(_timed(name, report, budget, shape, work, usable, rounds=2 if dry else rounds))
        ranked.sort(key=lambda line: float(line["us"]))
        report.row(f"{name}: best of {shape.name}", best=ranked[:5])
        del work
        if device == "cuda":
            torch.cuda.empty_cache()


def _timed(
    name: str, report: Report, budget: Budget, shape: Shape, work: Work, variants: list[Changes], rounds: int
) -> Iterator[dict[str, Any]]:
    """The default, then each variant, whose result must be the default's."""
    expected: Tensor | None = None
    for changes in [{}, *variants]:
        if budget.spent:
            return
        try:
            # all of it within the patch, since a launcher may choose at every call
            with configured(TUNINGS[name].chooser, changes):
                variant = through_seam("triton", work)
                variant.attend(work.caches[0])
                result = variant.out.float()
                expected = result if expected is None else expected
                difference = float((result - expected).norm() / expected.norm())
                if not difference < 0.02:
                    report.failure(f"{name}: {shape.name}", f"{changes}: {difference} from the default's result")
                    continue
                runs = {"": work.rounds_of(variant.attend)}
                times = alternating(runs, calls=work.calls, rounds=rounds, graphs=shape.phase == "decode")
        except Exception:
            report.failure(f"{name}: {shape.name}: {changes}", traceback.format_exc())
            continue
        line = {"us": round(median(times[""]), 2), **(changes or {"default": True})}
        report.row(f"{name}: {shape.name}", **line)
        yield line


def _compiled(
    name: str,
    shapes: Sequence[Shape],
    variants: list[Changes],
    layout: KVLayout,
    device: str,
    processes: int,
    budget: Budget,
) -> Iterator[tuple[Changes, str]]:
    """Each variant and shape, as it has been compiled, with its fault."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context)
    futures = {
        pool.submit(compile_variant, name, shape, changes, layout.name, device): changes
        for changes in variants
        for shape in shapes
    }
    # What is not compiled within half the time, or after a process died, is compiled when it is timed.
    with contextlib.suppress(TimeoutError, BrokenExecutor):
        for future in as_completed(futures, timeout=max(1.0, budget.left / 2)):
            yield futures[future], future.result()
    pool.shutdown(cancel_futures=True)


def _dtype(device: str) -> torch.dtype:
    return torch.float16 if device == "cpu" else torch.bfloat16
