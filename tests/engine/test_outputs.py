"""Times derived from a request's metrics."""

from __future__ import annotations

from enginebay.engine.outputs import RequestMetrics


def test_times_are_differences() -> None:
    metrics = RequestMetrics(
        arrival_time=10.0,
        first_scheduled_time=10.5,
        first_token_time=12.0,
        last_token_time=13.0,
        finished_time=13.0,
        num_output_tokens=5,
    )
    assert (metrics.queue_time, metrics.time_to_first_token, metrics.mean_inter_token_time) == (0.5, 2.0, 0.25)


def test_what_has_not_happened_has_no_time() -> None:
    waiting = RequestMetrics(arrival_time=10.0)
    assert (waiting.queue_time, waiting.time_to_first_token, waiting.mean_inter_token_time) == (None, None, None)
    single = RequestMetrics(arrival_time=10.0, first_token_time=11.0, last_token_time=11.0, num_output_tokens=1)
    assert single.mean_inter_token_time is None
