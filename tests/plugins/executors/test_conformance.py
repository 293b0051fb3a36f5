"""The in-tree executors pass the suite that every author runs."""

from __future__ import annotations

from enginebay.conformance import ExecutorConformance


class TestUniproc(ExecutorConformance):
    plugin = "uniproc"
