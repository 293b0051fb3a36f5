from __future__ import annotations

import pytest
from enginebay.bench.figures import distribution_ms, latency_figures, startup_figures, throughput_figures
from enginebay.bench.process import RunResult
from enginebay.bench.workload import Workload

WORK = Workload(prompts=[[1, 2], [3, 4, 5]], lengths=[3, 2])
RUNS = [RunResult([[1.0, 2.0, 4.0], [1.5, 2.0]], 10), RunResult([[1.0, 1.5, 2.0], [1.0, 1.25]], None)]


def test_throughput_is_the_median_runs() -> None:
    figures = throughput_figures(WORK, RUNS)
    assert figures["seconds"] == [4.0, 2.0]
    assert figures["requests_per_s"] == pytest.approx(2 / 3)
    assert figures["input_tokens_per_s"] == pytest.approx(5 / 3)
    assert figures["output_tokens_per_s"] == pytest.approx(5 / 3)
    assert figures["total_tokens_per_s"] == pytest.approx(10 / 3)
    assert figures["peak_memory_bytes"] == 10


def test_first_tokens_and_gaps_are_kept_apart() -> None:
    figures = latency_figures(WORK, RUNS)
    assert figures["ttft_ms"]["min"] == 1000
    assert figures["ttft_ms"]["mean"] == pytest.approx(1125)
    # gaps: 1, 2, 0.5, 0.5, 0.5, 0.25 s
    assert figures["inter_token_ms"]["p50"] == pytest.approx(500)
    assert figures["inter_token_ms"]["max"] == pytest.approx(2000)
    assert figures["batch_ms"]["p50"] == pytest.approx(3000)


def test_one_token_answers_have_no_gaps() -> None:
    figures = throughput_figures(Workload(prompts=[[1]], lengths=[1]), [RunResult([[0.5]], None)])
    assert figures["inter_token_ms"] is None
    assert figures["peak_memory_bytes"] is None


def test_percentiles() -> None:
    found = distribution_ms([i / 1000 for i in range(101)])
    assert found is not None
    assert (found["p50"], found["p90"], found["p99"]) == pytest.approx((50, 90, 99))
    assert distribution_ms([]) is None


def test_starts() -> None:
    cold = [{"import": 1.0, "load": 2.0}, {"import": 3.0, "load": 2.0}, {"import": 2.0, "load": 9.0}]
    figures = startup_figures({"cold": cold, "warm": [{"import": 1.0, "load": 1.0}]})
    assert figures["cold"]["total_s"] == 5.0
    assert figures["cold"]["parts_s"] == {"import": 2.0, "load": 2.0}
    assert figures["warm"]["starts"] == [{"import": 1.0, "load": 1.0}]
