"""Our Triton kernels on small, awkward sizes in one process, for NVIDIA's memory checker:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 python3 benchmarks/gpu/memcheck.py

Without torch's caching every tensor is an allocation of its own, so that reading past one is seen. Results are compared with
the answers too. ``--dry`` proves the script on a CPU: attention under the interpreter, the rest in torch's way.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from attention_cases import LAYOUTS, record_of
from batch_steps import equal_on
from enginebay.conformance.attention.cases import Case, Work
from enginebay.conformance.attention.trial import check, passed
from enginebay.plugins.requirements import FP8
from fused_ops import OPERATIONS, Sizes, worst_error
from measuring import Report, synchronize

#: head sizes, blocks, heads a KV head, and what else: sizes that fill no tile, and one that fills it
CASES: tuple[tuple[int, int, int, str, dict[str, Any]], ...] = (
    (64, 16, 7, "NHD", {}),
    (128, 16, 4, "NHD", {"window": 64}),
    (96, 32, 1, "HND", {"soft_cap": 30.0, "sinks": True}),
    (192, 16, 8, "NHD", {"sinks": True}),
    (256, 64, 4, "HND", {"kv_dtype": FP8}),
    (128, 256, 8, "NHD", {"kv_dtype": FP8, "window": 64}),
)
#: tokens of a row: past one tile and, in decode, enough for more than one split
LONGEST = 300


def attention(dry: bool) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Decode and extend steps by turns."""
    works: tuple[Work, ...] = ("decode", "extend")
    for number, (head_dim, block_size, group, layout, features) in enumerate(CASES[:1] if dry else CASES):
        for work in works:
            dtype = "float16" if dry else "bfloat16"
            case = Case(
                backend="triton",
                dtype=dtype,
                kv_dtype=features.get("kv_dtype", dtype),
                heads_per_kv=group,
                head_dim=head_dim,
                block_size=block_size,
                layout=LAYOUTS[layout],
                window=features.get("window"),
                soft_cap=features.get("soft_cap"),
                sinks=features.get("sinks", False),
                work=work,
                lse=number % 2 == 0,
                captured=False,  # without the allocator's caching nothing can be captured
            )
            device, longest = ("cpu", 70) if dry else ("cuda", LONGEST)
            yield str(case), lambda case=case, d=device, n=longest: passed(check(record_of("triton"), case, d, n))  # type: ignore[misc]


def fused(dry: bool) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Every fused operation at a width that is no power of two, at one and at an odd number of tokens."""
    sizes = Sizes(width=576, mlp=1000, heads=9, kv_heads=3, head_dim=64)
    device, dtype = torch.device("cpu" if dry else "cuda"), torch.float16 if dry else torch.bfloat16
    for tokens in (1, 33):
        for make in OPERATIONS:
            operation = make(tokens, sizes, dtype, device, 1)
            yield f"{operation.name}, {tokens} tokens", lambda o=operation: worst_error(o) <= 1  # type: ignore[misc]


def preparation(dry: bool) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Positions, slot mappings and input ids, prepared on the device."""
    yield "batch preparation", lambda: equal_on(torch.device("cpu" if dry else "cuda"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--dry", action="store_true", help="a few, on a CPU")
    args = parser.parse_args()
    report = Report(args.out, "memcheck")
    ran = 0
    for part in (attention, fused, preparation):
        for name, work in part(args.dry):
            try:
                with torch.inference_mode():
                    right = work()
                    synchronize()
            except Exception:
                report.failure(name, traceback.format_exc())
                continue
            ran += 1
            if not right:
                report.failure(name, "the result is wrong")
    report.row("memcheck", ran=ran, failures=report.failures)
    sys.exit(min(report.failures, 8))


if __name__ == "__main__":
    main()
