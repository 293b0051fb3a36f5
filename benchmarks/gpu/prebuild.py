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
from pathlib import Path

import torch
from flashinfer.jit.attention.modules import _gen_batch_prefill_primary_module, gen_batch_prefill_module

#: backends in order of need: fa2 serves decode (tensor cores) and every prefill below sm_90, fa3 prefill on sm_90
BACKENDS = ("fa2", "fa3")


def build(backend: str, head_dim: int, dtype: torch.dtype, out: Path) -> Path:
    """One module, without window and soft cap, copied to ``out/<name>/<name>.so``."""
    make = _gen_batch_prefill_primary_module if backend == "fa2" else gen_batch_prefill_module
    # positional: backend, q, kv, o, index dtype, head dims, no position encoding, no window, no soft cap, fp32 scores
    spec = make(backend, dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, False, False, False)
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
    args = parser.parse_args()
    for head_dim in args.head_dims:
        for backend in args.backends:
            for dtype in args.dtypes:
                started = time.perf_counter()
                path = build(backend, head_dim, getattr(torch, dtype), args.out)
                print(f"{path.name}: {path.stat().st_size / 2**20:.1f} MiB, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
