"""The in-tree quantizer and the local one of the examples pass the suite that every author runs."""

from __future__ import annotations

from pathlib import Path

from enginebay.conformance import QuantConformance

EXAMPLES = Path(__file__).parents[3] / "examples"


class TestGGUF(QuantConformance):
    plugin = "gguf"


class TestInt8Groups(QuantConformance):
    plugin = "int8_groups"
    local = str(EXAMPLES / "int8_groups.py")
