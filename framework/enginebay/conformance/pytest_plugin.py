"""The pytest plugin: options of a conformance run, known failures, and the report. It imports no torch and has no fixture.

It is registered by entry point, so that an author's own ``pytest`` finds it; in a test run without a class of the suite it
does nothing.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from enginebay.conformance.suite import Conformance

_REPORT = pytest.StashKey[Any]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of ``enginebay conformance run``, under pytest's names."""
    group = parser.getgroup("enginebay", "enginebay's conformance suite")
    group.addoption(
        "--enginebay-device",
        dest="enginebay_device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="device that plugins are tried on (default: cpu)",
    )
    group.addoption(
        "--enginebay-level",
        dest="enginebay_level",
        choices=("core", "full"),
        default="core",
        help="core: within a minute; full: sizes as they are met in use (default: core)",
    )
    group.addoption(
        "--enginebay-exhaustive",
        dest="enginebay_exhaustive",
        action="store_true",
        help="all combinations of features instead of all pairs",
    )
    group.addoption(
        "--enginebay-report",
        dest="enginebay_report",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="write a report to FILE, .json or .md; may be given several times",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start the report, where one is wanted."""
    for path in config.getoption("enginebay_report"):
        if path.suffix not in (".json", ".md"):
            raise pytest.UsageError(f"--enginebay-report {path}: a report is .json or .md")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark laws that a record declares as broken, and refuse other ways around a law."""
    if not any(_is_law(item) for item in items):
        return
    from enginebay.conformance.report import Report
    from enginebay.conformance.suite import law_faults, law_name, laws

    config.stash[_REPORT] = report = Report()
    for item in items:
        if not _is_law(item):
            continue
        suite = _suite(item)
        if faults := law_faults(suite):
            raise pytest.UsageError("\n".join(faults))
        law = law_name(item)
        if law not in laws(suite):  # a further test of the author's
            continue
        if item.get_closest_marker("xfail") is not None:
            raise pytest.UsageError(
                f"{item.nodeid} is marked xfail; declare what a plugin cannot keep in its record's known_failures"
            )
        report.expect(suite, law, getattr(item, "function").__doc__ or "")  # noqa: B009 - not of every item
        reason = suite.tried()[0].known_failures.get(law)
        if reason is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note what became of a case."""
    outcome = yield
    report = item.config.stash.get(_REPORT, None)
    if report is not None and _is_law(item):
        from enginebay.conformance.suite import law_name

        report.note(_suite(item), law_name(item), outcome)
    return outcome


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say the verdict on each plugin, and write the reports."""
    report = config.stash.get(_REPORT, None)
    if report is None or config.getoption("collectonly"):
        return
    from enginebay.conformance.suite import Settings

    settings = Settings.of(config)
    terminalreporter.section("enginebay conformance")
    for line in report.lines(settings):
        terminalreporter.write_line(line)
    for path in config.getoption("enginebay_report"):
        report.write(path, settings)


def _is_law(item: pytest.Item) -> bool:
    suite = getattr(item, "cls", None)
    # looked up by name: importing the suite here would cost every test run
    return suite is not None and any(base.__module__ == "enginebay.conformance.suite" for base in suite.__mro__)


def _suite(item: pytest.Item) -> type[Conformance]:
    suite: type[Conformance] = item.cls  # type: ignore[attr-defined]
    return suite
