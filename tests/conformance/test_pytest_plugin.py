"""The suite in an author's own pytest: options, known failures, what may not be replaced, the report, and what it costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HEAD = """\
from dataclasses import replace
import pytest
from enginebay.conformance import AttentionConformance
from attention_mutants import *
"""


def run(folder: Path, body: str, *options: str) -> tuple[int, str, dict[str, Any]]:
    """Exit status, output and JSON report of pytest on a test file of this body."""
    (folder / "test_it.py").write_text(HEAD + body)
    (folder / "pytest.ini").write_text("[pytest]\n")
    report = folder / "report.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    command += ["-c", str(folder / "pytest.ini"), "-o", f"pythonpath={ROOT / 'tests' / 'mutants'}"]
    command += ["--enginebay-report", str(report), *options, str(folder / "test_it.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr, json.loads(report.read_text()) if report.exists() else {}


PLAIN = """
class TestPlain(AttentionConformance):
    @classmethod
    def load_record(cls):
        return record_of({backend}, {fields}), None
"""
FEW = ("-k", "factory or lse or host_lengths")


def laws_of(report: dict[str, Any]) -> dict[str, str]:
    return {law["law"]: law["outcome"] for law in report["plugins"][0]["laws"]}


def test_a_known_failure_is_expected_with_its_reason(tmp_path: Path) -> None:
    known = 'known_failures={"host_lengths_are_read_as_declared": "reads them, see issue 7"}'
    status, text, report = run(tmp_path, PLAIN.format(backend="ReadsHostLengths", fields=known), *FEW)
    assert status == 0, text
    assert laws_of(report)["host_lengths_are_read_as_declared"] == "known failure"
    law = next(law for law in report["plugins"][0]["laws"] if law["outcome"] == "known failure")
    assert law["reasons"] == ["reads them, see issue 7"]
    assert law["says"].startswith("``host_lens=")


def test_a_known_failure_that_does_not_fail_fails(tmp_path: Path) -> None:
    known = 'known_failures={"host_lengths_are_read_as_declared": "reads them"}'
    status, text, report = run(tmp_path, PLAIN.format(backend="Plain", fields=known), *FEW)
    assert status == 1, text
    assert laws_of(report)["host_lengths_are_read_as_declared"] == "failed"


def test_a_known_failure_of_no_law_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    known = 'known_failures={"host_lengths_are_red_as_declared": "?"}'
    status, text, _ = run(tmp_path, PLAIN.format(backend="Plain", fields=known))
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "which is no law of its kind. Did you mean 'host_lengths_are_read_as_declared'?" in text


def test_a_law_may_not_be_replaced(tmp_path: Path) -> None:
    body = PLAIN.format(backend="Plain", fields="") + "    def test_rows_may_share_blocks(self): pass\n"
    status, text, _ = run(tmp_path, body)
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "replaces the law 'rows_may_share_blocks'; declare what a plugin cannot keep in its record" in text


def test_a_law_may_not_be_marked_away(tmp_path: Path) -> None:
    body = PLAIN.format(backend="Plain", fields="").replace(
        "class TestPlain", "@pytest.mark.xfail(reason='no')\nclass TestPlain"
    )
    status, text, _ = run(tmp_path, body)
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "is marked xfail; declare what a plugin cannot keep in its record's known_failures" in text


def test_a_class_that_is_skipped_is_not_judged(tmp_path: Path) -> None:
    body = PLAIN.format(backend="Plain", fields="").replace(
        "class TestPlain", "@pytest.mark.skip(reason='no')\nclass TestPlain"
    )
    status, text, report = run(tmp_path, body)
    assert status == 0, text
    assert report["plugins"][0]["verdict"] == "not judged"


def test_further_tests_of_the_authors_run_beside_the_laws(tmp_path: Path) -> None:
    body = PLAIN.format(backend="Plain", fields="") + "    def test_of_mine(self): assert True\n"
    status, text, report = run(tmp_path, body, "-k", "factory or of_mine")
    assert status == 0, text
    assert "of_mine" not in laws_of(report)
    assert "2 passed" in text


def test_a_run_that_leaves_laws_out_is_not_judged(tmp_path: Path) -> None:
    status, text, report = run(tmp_path, PLAIN.format(backend="Plain", fields=""), *FEW)
    assert status == 0, text
    assert report["plugins"][0]["verdict"] == "not judged"
    assert "attention:plain on cpu, core: not judged" in text


def test_a_report_of_another_form_is_refused(tmp_path: Path) -> None:
    status, text, _ = run(tmp_path, "", "--enginebay-report", str(tmp_path / "x.html"))
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "a report is .json or .md" in text


def test_an_unnamed_plugin_is_refused(tmp_path: Path) -> None:
    status, text, _ = run(tmp_path, "class TestNone(AttentionConformance): pass\n")
    assert status != 0
    assert "TestNone names no plugin; set plugin = ..." in text


def test_a_test_run_without_the_suite_loads_nothing_of_it(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\ndef test_it():\n    assert not {'torch', 'numpy', 'enginebay.conformance.suite'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    command += ["--rootdir", str(tmp_path), "-c", "/dev/null", str(tmp_path / "test_it.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "enginebay conformance" not in done.stdout
