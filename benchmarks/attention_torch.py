"""Time of one layer of the torch attention backend, and of one plan: decode rows x context, prefill rows x tokens.

Run ``python benchmarks/attention_torch.py [--device cuda] [--threads 2]``. The shape is SmolLM2-135M's: 9 query heads,
3 KV heads of 64.
Microseconds are medians; on a shared machine read the least, in brackets.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from enginebay.interfaces.attention import AttentionContext, AttentionLayer
from enginebay.interfaces.batch import Bucket, GroupBatch, PhaseBatch, torch_dtype
from enginebay.plugins.records import HND, NHD, KVLayout, NoOptions, Phase
from enginebay.plugins.requirements import AttentionSpec
from enginebay_torch_attention import make

SPEC = AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125)
BLOCK = 16
#: phase, rows, tokens a row, context a row, this step's tokens included: least and most
WORK: tuple[tuple[Phase, int, int, int, int], ...] = (
    ("decode", 1, 1, 64, 64),
    ("decode", 1, 1, 200, 200),
    ("decode", 1, 1, 2048, 2048),
    ("decode", 8, 1, 128, 192),
    ("decode", 32, 1, 128, 192),
    ("decode", 32, 1, 16, 2048),
    ("prefill", 32, 8, 8, 8),
    ("prefill", 16, 128, 128, 128),
    ("prefill", 16, 64, 128, 128),
    ("prefill", 1, 512, 512, 512),
    ("prefill", 1, 512, 2048, 2048),
)


def make_batch(rows: int, query_len: int, least: int, most: int, device: torch.device) -> PhaseBatch:
    lens = np.linspace(least, most, rows).astype(np.int32)
    blocks = -(-most // BLOCK)
    table = torch.randperm(rows * blocks)[: rows * blocks].add(1).view(rows, blocks).int()
    starts = np.arange(rows + 1, dtype=np.int32) * query_len
    tokens = rows * query_len
    nothing = torch.zeros(tokens, dtype=torch.int64, device=device)
    return PhaseBatch(
        num_rows=rows,
        num_tokens=tokens,
        max_query_len=query_len,
        max_seq_len=most,
        query_start_loc=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(lens).to(device),
        positions=nothing,
        groups=(GroupBatch(table.to(device), nothing),),
        query_start_loc_host=starts,
        seq_lens_host=lens,
    )


def microseconds(work: Callable[[], None], device: torch.device, seconds: float) -> str:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start))
    return f"{median(times):8.0f} ({min(times):7.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32", "float16"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    print(f"{'work':34}{'dtype':10}{'layout':8}{'attend us':>18}{'plan us':>19}")
    layouts: tuple[KVLayout, ...] = (NHD, HND)
    for phase, rows, query_len, least, most in WORK:
        for name in arguments.dtypes:
            for layout in layouts:
                dtype = torch_dtype(name)
                batch = make_batch(rows, query_len, least, most, device)
                context = AttentionContext(
                    spec=SPEC, group=0, phase=phase, dtype=dtype, kv_dtype=dtype, device=device, block_size=BLOCK,
                    layout=layout, max_num_rows=rows, max_num_tokens=batch.num_tokens, max_model_len=most,
                    options=NoOptions(),
                )  # fmt: skip
                backend = make(context)
                state = backend.make_state(Bucket(rows, query_len))
                blocks = int(batch.groups[0].block_table.max()) + 1
                sizes = {"blocks": blocks, "kv": 2, "block": BLOCK, "kv_heads": 3, "head_dim": 64}
                stored = torch.randn([sizes[a] for a in layout.axes], device=device).to(dtype)
                cache = stored.permute([layout.axes.index(a) for a in NHD.axes])
                query = torch.randn(batch.num_tokens, 9, 64, device=device).to(dtype)
                out = torch.empty_like(query)
                layer = AttentionLayer(0, SPEC)
                backend.plan(batch, state)

                def attend() -> None:
                    backend.attend(layer, query, cache, batch, state, out)  # noqa: B023 - called within the turn

                def plan() -> None:
                    backend.plan(batch, state)  # noqa: B023 - called within the turn

                attend()
                times = [microseconds(work, device, arguments.seconds) for work in (attend, plan)]
                label = f"{phase} {rows} x {query_len}, context {least}..{most}"
                print(f"{label:34}{name:10}{layout.name:8}{times[0]:>18} {times[1]:>18}", flush=True)


if __name__ == "__main__":
    main()
