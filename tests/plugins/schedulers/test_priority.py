"""The priority policy and its record."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from enginebay.interfaces.scheduler import Request
from enginebay.plugins.records import API_VERSION
from enginebay.sampling.params import SamplingParams
from enginebay_priority import enginebay_schedulers
from enginebay_priority.policy import UrgentFirst


def request(arrival: int, priority: int = 0) -> Request:
    prompt = np.zeros(1, np.int32)
    return Request(str(arrival), prompt, SamplingParams(), frozenset(), 1, seed=0, arrival=arrival, priority=priority)


def test_the_record_stands_behind_fcfs() -> None:
    """Auto must not change whom an engine serves first."""
    (record,) = enginebay_schedulers()
    assert (record.name, record.depth, record.api_version) == ("priority", "policy", API_VERSION["scheduler"])
    assert record.priority < 0


def test_requests_are_admitted_by_urgency_and_then_as_they_arrived() -> None:
    policy = UrgentFirst()
    requests = [request(3), request(1, priority=9), request(2, priority=-5), request(4, priority=-5)]
    assert [r.arrival for r in sorted(requests, key=policy.admission_key)] == [2, 4, 3, 1]
    assert policy.uses_priority


def test_the_least_urgent_gives_way_and_of_those_the_latest() -> None:
    policy = UrgentFirst()
    running = [request(5), request(2, priority=3), request(4, priority=3), request(9)]
    assert policy.choose_victim(running).arrival == 4


def test_only_the_less_urgent_are_displaced() -> None:
    """C20: an urgent arrival takes a seat; equals keep theirs, whoever came first."""
    policy = UrgentFirst()
    assert policy.may_preempt(request(9, priority=-1), request(1))
    assert not policy.may_preempt(request(1), request(9))
    assert not policy.may_preempt(request(1, priority=1), request(9))


def test_importing_the_plugin_loads_neither_its_policy_nor_torch() -> None:
    code = "import sys, enginebay_priority; print({'torch', 'enginebay_priority.policy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
