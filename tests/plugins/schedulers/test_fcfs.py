"""The first-come-first-served policy and its record."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from enginebay.interfaces.scheduler import Request, SchedulerContext
from enginebay.kv_cache.coordinator import KVCacheCoordinator
from enginebay.plugins.records import API_VERSION, NoOptions
from enginebay.sampling.params import SamplingParams
from enginebay_fcfs import enginebay_schedulers
from enginebay_fcfs.policy import FirstComeFirstServed


def request(arrival: int, priority: int = 0) -> Request:
    prompt = np.zeros(1, np.int32)
    return Request(str(arrival), prompt, SamplingParams(), frozenset(), 1, seed=0, arrival=arrival, priority=priority)


def test_record_builds_the_policy() -> None:
    (record,) = enginebay_schedulers()
    assert (record.name, record.depth, record.priority) == ("fcfs", "policy", 0)
    assert record.api_version == API_VERSION["scheduler"]
    assert record.async_scheduling
    kv = KVCacheCoordinator(windows=[None], block_size=4, num_blocks=3, max_num_seqs=1, max_model_len=8)
    context = SchedulerContext(
        kv=kv,
        max_num_seqs=1,
        max_num_batched_tokens=8,
        max_model_len=8,
        chunked_prefill=True,
        max_concurrent_batches=1,
        policy=None,
        options=NoOptions(),
    )
    assert isinstance(record.factory(context), FirstComeFirstServed)


def test_requests_are_admitted_as_they_arrived_whatever_their_priority() -> None:
    policy = FirstComeFirstServed()
    requests = [request(3), request(1, priority=9), request(2, priority=-5)]
    assert [r.arrival for r in sorted(requests, key=policy.admission_key)] == [1, 2, 3]


def test_the_latest_arrival_gives_way_and_never_for_a_seat() -> None:
    policy = FirstComeFirstServed()
    running = [request(5), request(9), request(7)]
    assert policy.choose_victim(running).arrival == 9
    assert not policy.may_preempt(request(1), running[0])
    assert policy.prefill_quota(num_decode_rows=3, budget=13) == 13


def test_importing_the_plugin_loads_neither_its_policy_nor_torch() -> None:
    code = "import sys, enginebay_fcfs; print({'torch', 'enginebay_fcfs.policy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
