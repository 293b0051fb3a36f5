"""Host time of the scheduler: microseconds a step of ``schedule`` and ``update``, at full batch and under a long queue; and
of finding a long prompt in the prefix cache.

    python benchmarks/scheduler.py

Steps are answered with made-up tokens at once, with one more step in flight, as asynchronous scheduling has it. Under
pressure the pool holds a third of what the running requests want, so that preemption is part of the work.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np
from enginebay.interfaces.scheduler import ModelOutput, Request, SchedulerContext, SchedulerOutput
from enginebay.kv_cache.coordinator import KVCacheCoordinator
from enginebay.plugins.records import NoOptions
from enginebay.sampling.params import SamplingParams
from enginebay.scheduling.scheduler import TokenBudgetScheduler
from enginebay_fcfs.policy import FirstComeFirstServed

NUM_SEQS, PROMPT, OUTPUTS, STEPS = 256, 64, 400, 300


def measure(title: str, num_requests: int, num_blocks: int) -> None:
    kv = KVCacheCoordinator(
        windows=[None], block_size=16, num_blocks=num_blocks, max_num_seqs=NUM_SEQS, max_model_len=4096
    )
    scheduler = TokenBudgetScheduler(
        SchedulerContext(
            kv=kv,
            max_num_seqs=NUM_SEQS,
            max_num_batched_tokens=8192,
            max_model_len=4096,
            chunked_prefill=True,
            max_concurrent_batches=2,
            policy=FirstComeFirstServed(),
            options=NoOptions(),
        )
    )
    prompt, params = np.arange(PROMPT, dtype=np.int32), SamplingParams(max_tokens=OUTPUTS)
    for i in range(num_requests):
        scheduler.add(Request(str(i), prompt, params, frozenset({2}), OUTPUTS, seed=i, arrival=i))

    flying: deque[SchedulerOutput] = deque()
    schedule_us, update_us, rows = [], [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        output = scheduler.schedule()
        schedule_us.append((time.perf_counter() - start) * 1e6)
        if output is not None:
            flying.append(output)
        if len(flying) < 2:
            continue
        step = flying.popleft()
        result = ModelOutput(np.full((step.num_rows, 1), 7, np.int32), step.samples.astype(np.int32))
        start = time.perf_counter()
        scheduler.update(step, result)
        update_us.append((time.perf_counter() - start) * 1e6)
        rows.append(step.num_rows)
    medians = np.median(schedule_us), np.median(update_us)
    worst = np.percentile(np.array(schedule_us[: len(update_us)]) + np.array(update_us), 99)
    stats = scheduler.stats()
    print(
        f"{title:<34} schedule {medians[0]:6.0f} us  update {medians[1]:6.0f} us  sum {sum(medians):6.0f} us  "
        f"p99 {worst:6.0f} us  rows {np.mean(rows):5.0f}  waiting {stats.num_waiting}  "
        f"preemptions {stats.num_preemptions}"
    )


def measure_prefix(tokens: int) -> None:
    """Look-up of a long prompt that is cached, by a fresh request, as an engine meets it."""
    kv = KVCacheCoordinator(windows=[None], block_size=16, num_blocks=4096, max_num_seqs=2, max_model_len=40_000)
    prompt = np.random.default_rng(0).integers(0, 50_000, tokens).astype(np.int32)
    slot, count = np.zeros(1, np.int32), np.full(1, tokens, np.int32)

    def request() -> Request:
        return Request("r", prompt, SamplingParams(), frozenset(), 16, seed=0)

    first = request()
    kv.seat(0, first, kv.find_prefix(first))
    kv.allocate(slot, count)
    kv.commit(slot, count)
    kv.free(0)
    milliseconds = []
    for _ in range(20):
        fresh = request()
        start = time.perf_counter()
        hit = kv.find_prefix(fresh)
        milliseconds.append((time.perf_counter() - start) * 1e3)
    print(f"prefix of {hit.num_tokens:,} of {tokens:,} tokens found in {np.median(milliseconds):.2f} ms")


if __name__ == "__main__":
    plenty = NUM_SEQS * -(-(PROMPT + OUTPUTS) // 16) + 1
    measure("256 running", NUM_SEQS, plenty)
    measure("256 running, 1,000 waiting", NUM_SEQS + 1000, plenty)
    measure("blocks for a third, 1,000 waiting", NUM_SEQS + 1000, plenty // 3)
    measure_prefix(32_768)
