"""A pytest plugin: after a class's first failure, the rest of it is skipped. Only the first law that fails is of interest."""

from __future__ import annotations

from collections.abc import Generator

import pytest

_dead: set[object] = set()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what comes after a failure."""
    if getattr(item, "cls", None) in _dead:
        pytest.skip("an earlier law was broken")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note failures."""
    report = yield
    if report.failed:
        _dead.add(getattr(item, "cls", None))
    return report
