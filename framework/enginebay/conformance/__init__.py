"""The conformance suite: one class a kind of plugin, whose test methods are the laws of that kind's contract.

    from enginebay.conformance import AttentionConformance

    class TestAcme(AttentionConformance):
        plugin = "acme"

is a whole test file; ``enginebay conformance run attention:acme`` runs the same class without one. Cases come from what the
plugin's record declares, and what it does not declare must be refused. Names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from enginebay.conformance.suite_names import SUITES

if TYPE_CHECKING:
    from enginebay.conformance.attention.laws import AttentionConformance
    from enginebay.conformance.executor.laws import ExecutorConformance
    from enginebay.conformance.model.laws import ModelConformance
    from enginebay.conformance.quant.laws import QuantConformance
    from enginebay.conformance.sampler.laws import LogitsProcessorConformance
    from enginebay.conformance.scheduler.laws import SchedulerConformance

__all__ = [
    "AttentionConformance",
    "ExecutorConformance",
    "LogitsProcessorConformance",
    "ModelConformance",
    "QuantConformance",
    "SchedulerConformance",
]


def __getattr__(name: str) -> Any:
    if name not in SUITES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(SUITES[name]), name)
