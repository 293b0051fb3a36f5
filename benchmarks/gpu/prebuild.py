"""Compile the FlashInfer modules that the benchmarks need, on a machine that has nvcc but no GPU.

FlashInfer loads a shared object found under ``flashinfer/data/aot/<name>/<name>.so`` without compiling anything. What
is built here goes there. The modules speak through tvm-ffi and hold no torch symbol, so that the torch of the building
machine does not matter; its CUDA toolkit must be of the same major version as the target's.

Set ``FLASHINFER_CUDA_ARCH_LIST`` (e.g. ``9.0a``) and ``FLASHINFER_WORKSPACE_BASE`` (scratch) before running.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from flashinfer.jit.attention.modules import _gen_batch_prefill_primary_module, gen_batch_prefill_module

#: fa2 serves decode (tensor cores), an fp8 cache, short queries and every prefill below sm_90; fa3 prefill on sm_90
BACKENDS = ("fa2", "fa3")
HOPPER = (9, 0)


@dataclass(frozen=True, order=True)
class Module:
    """What FlashInfer compiles a module of its own for."""

    backend: str
    dtype: str
    kv_dtype: str
    head_dim: int
    window: bool = False
    soft_cap: bool = False


def plain_modules(backends: list[str], dtypes: list[str], head_dims: list[int]) -> list[Module]:
    """Modules without window and soft cap over a cache of the compute dtype, in the order of `head_dims`."""
    return [Module(b, dtype, dtype, d) for d in head_dims for b in backends for dtype in dtypes]


def conformance_modules() -> list[Module]:
    """What the core level of the conformance suite takes on Hopper."""
    from enginebay.conformance.attention.cases import Work, declared_cases, plain_case
    from enginebay.conformance.suite import Settings
    from enginebay.plugins.requirements import Hardware
    from enginebay_flashinfer import RECORD

    record = replace(RECORD, requires=(), requires_dist=())  # neither need be installed here
    settings, hardware = Settings(device="cuda"), Hardware(device="cuda", capability=HOPPER)
    works: tuple[Work, ...] = ("decode", "prefill", "extend")
    plain = [case for work in works if (case := plain_case(record, settings, work, hardware))]
    found = set()
    for case in [*declared_cases(record, settings, hardware), *plain]:
        fa3 = case.work != "decode" and case.kv_dtype == case.dtype
        features = (case.dtype, case.kv_dtype, case.head_dim, case.window is not None, case.soft_cap is not None)
        found.add(Module("fa3" if fa3 else "fa2", *features))
    # plain cases have short chunks too
    return sorted(found | {Module("fa2", case.dtype, case.kv_dtype, case.head_dim) for case in plain})


def build(module: Module, out: Path) -> Path:
    """One module, copied to ``out/<name>/<name>.so``."""
    make = _gen_batch_prefill_primary_module if module.backend == "fa2" else gen_batch_prefill_module
    dtype, kv_dtype, size = getattr(torch, module.dtype), getattr(torch, module.kv_dtype), module.head_dim
    # positional: backend, q, kv, o, index dtype, head dims, no position encoding, window, soft cap, fp32 scores
    features = (0, module.window, module.soft_cap, False)
    spec = make(module.backend, dtype, kv_dtype, dtype, torch.int32, size, size, *features)
    target: Path = out / spec.name / f"{spec.name}.so"
    if target.exists():
        return target
    spec.build(verbose=False)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(spec.jit_library_path, target)
    subprocess.run(["strip", "--strip-unneeded", str(target)], check=True)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder that becomes flashinfer/data/aot")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument(
        "--conformance", action="store_true", help="and those of the suite's core level, an hour on 2 cores"
    )
    args = parser.parse_args()
    modules = plain_modules(args.backends, args.dtypes, args.head_dims)
    for module in dict.fromkeys([*modules, *(conformance_modules() if args.conformance else [])]):
        started = time.perf_counter()
        path = build(module, args.out)
        print(f"{path.name}: {path.stat().st_size / 2**20:.1f} MiB, {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
