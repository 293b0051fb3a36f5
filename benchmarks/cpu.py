"""CPU throughput and latency on SmolLM2-135M: W1 (32 x 128 in, 64 out), W2 (one stream), W3 (shared prefix); peak memory.

    python benchmarks/cpu.py [--dtype bfloat16] [--runs 3] [--work cpu_w1 cpu_w2 cpu_w3] [--profile]
    python benchmarks/cpu.py --peers vllm=/path/to/python,llama-cpp=/path/to/python,transformers=/path/to/python

Greedy, ignoring end-of-sequence, no detokenizing. One warm-up run of the same work, then the median.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from typing import Any

from cpu_peers import compare, parse_peers
from enginebay import LLM, SamplingParams
from workloads import get


def rss_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def run(llm: LLM, prompts: list[list[int]], lengths: list[int]) -> float:
    params = [SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=n) for n in lengths]
    llm.reset_prefix_cache()  # a run must not find the prompts of the one before
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--work", nargs="+", default=["cpu_w1", "cpu_w2", "cpu_w3"])
    parser.add_argument(
        "--profile", action="store_true", help="print where the last work's time went, by torch operator"
    )
    parser.add_argument(
        "--peers", type=parse_peers, help="NAME=PYTHON,…: run them and us in turn, on the same bytes; see cpu_peers.py"
    )
    args = parser.parse_args()
    if args.peers is not None:
        if args.profile:
            parser.error("--profile is of our engine alone: leave out --peers")
        compare(args.model, args.dtype, args.runs, args.work, args.peers)
        return
    import torch
    import transformers  # noqa: F401 - part of what an import costs

    imported = rss_bytes()
    start = time.perf_counter()
    llm = LLM(model=args.model, dtype=args.dtype, device="cpu", max_model_len=2048)
    started = time.perf_counter() - start
    resolved = llm.info.resolved
    config = llm._client._core.executor.kv_cache_spec()  # type: ignore[attr-defined]
    assert resolved.num_kv_blocks is not None
    pool = config.block_bytes(torch.finfo(getattr(torch, resolved.kv_dtype)).bits // 8) * resolved.num_kv_blocks
    rows: dict[str, Any] = {"start_s": round(started, 2), "kv_pool_gb": round(pool / 1e9, 2)}
    for work in args.work:
        prompts, lengths = get(work)
        run(llm, prompts, lengths)
        seconds = [run(llm, prompts, lengths) for _ in range(args.runs)]
        median = statistics.median(seconds)
        first = run(llm, prompts, [1] * len(prompts))
        rows[work] = {
            "seconds": [round(s, 3) for s in seconds],
            "out_tokens_per_s": round(sum(lengths) / median, 1),
            "ms_per_token": round((median - first) / (max(lengths) - 1) * 1000, 2),
            "first_token_ms": round(first * 1000, 1),
        }
        print(json.dumps({work: rows[work]}), flush=True)
    if args.profile:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]) as prof:
            run(llm, prompts, lengths)
        print(prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))
    weights = sum(p.numel() * p.element_size() for p in llm._client._core.executor._worker._model.parameters())  # type: ignore[attr-defined]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    rows["memory_gb"] = {
        "after_import": round(imported / 1e9, 3),
        "weights": round(weights / 1e9, 3),
        "kv_pool": round(pool / 1e9, 3),
        "peak": round(peak / 1e9, 3),
        "limit_with_25_percent": round(1.25 * (imported + weights + pool) / 1e9, 3),
    }
    print(json.dumps(rows, indent=1))
    llm.shutdown()


if __name__ == "__main__":
    main()
