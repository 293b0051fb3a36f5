"""The example logits processors pass the suite that every author runs."""

from __future__ import annotations

from pathlib import Path

from enginebay.conformance import LogitsProcessorConformance

EXAMPLES = Path(__file__).parents[3] / "examples"


class TestNoRepeatNgram(LogitsProcessorConformance):
    plugin = "no_repeat_ngram"
    local = str(EXAMPLES / "no_repeat_ngram.py")


class TestTopNSigma(LogitsProcessorConformance):
    plugin = "top_n_sigma"
    local = str(EXAMPLES / "top_n_sigma.py")
