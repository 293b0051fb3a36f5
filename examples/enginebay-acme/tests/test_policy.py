"""The order in which the policy serves."""

import numpy as np
import pytest
from enginebay import SamplingParams
from enginebay.interfaces.scheduler import Request

from enginebay_acme.policy import ShortestJobFirst


def job(arrival: int, prompt: int, output: int) -> Request:
    """A request of so many tokens."""
    return Request(
        request_id=str(arrival),
        prompt_token_ids=np.zeros(prompt, dtype=np.int32),
        params=SamplingParams(),
        stop_token_ids=frozenset(),
        max_output_tokens=output,
        seed=0,
        arrival=arrival,
    )


def served(policy: ShortestJobFirst, *jobs: Request) -> list[str]:
    """Their ids in the order of admission."""
    return [request.request_id for request in sorted(jobs, key=policy.admission_key)]


def test_the_least_work_comes_first_whether_it_is_read_or_written() -> None:
    """A long prompt with a short answer may be less work than the reverse."""
    assert served(ShortestJobFirst(0.5), job(0, 10, 90), job(1, 60, 10), job(2, 5, 5)) == ["2", "1", "0"]


def test_equal_work_is_served_as_it_arrived() -> None:
    """Nobody overtakes without a reason."""
    assert served(ShortestJobFirst(0.5), job(3, 4, 4), job(1, 4, 4), job(2, 4, 4)) == ["1", "2", "3"]


@pytest.mark.parametrize("rate", [0.5, 4.0])
def test_a_long_job_waits_for_a_bounded_number_of_short_ones(rate: float) -> None:
    """At most ``n / rate`` of those that came later go first."""
    policy, long = ShortestJobFirst(rate), job(0, 50, 50)
    ahead = [a for a in range(1, 1000) if policy.admission_key(job(a, 1, 1)) < policy.admission_key(long)]
    assert 0 < len(ahead) <= 100 / rate


def test_the_longest_gives_way() -> None:
    """When blocks are short."""
    assert ShortestJobFirst(0.5).choose_victim([job(0, 9, 9), job(1, 90, 9), job(2, 1, 1)]).request_id == "1"
