"""Which class holds the laws of which kind, and where it is; nothing is imported to know."""

from __future__ import annotations

#: class -> the module that holds it
SUITES = {
    "AttentionConformance": "enginebay.conformance.attention.laws",
    "ExecutorConformance": "enginebay.conformance.executor.laws",
    "ModelConformance": "enginebay.conformance.model.laws",
    "QuantConformance": "enginebay.conformance.quant.laws",
    "LogitsProcessorConformance": "enginebay.conformance.sampler.laws",
    "SchedulerConformance": "enginebay.conformance.scheduler.laws",
}
#: kind -> class
SUITE_OF_KIND = {
    "attention": "AttentionConformance",
    "executor": "ExecutorConformance",
    "model": "ModelConformance",
    "quant": "QuantConformance",
    "sampler": "LogitsProcessorConformance",
    "scheduler": "SchedulerConformance",
}
