from __future__ import annotations

from importlib import metadata

import pytest
from enginebay.plugins.distributions import check_requirement, distribution_fault


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Distributions by version, the only ones there are."""
    versions: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    return versions


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ("0.6.14", "acme>=0.6.14"),
        ("0.10.0", "acme>=0.6.14"),
        ("4.0.0b36", "acme>=4.0.0b36"),
        ("3.6.0+cu130", "acme>=3.6,<4"),
        ("1.0", "acme"),
        ("1.0", "acme>=9; platform_system == 'Nowhere'"),
    ],
)
def test_met(installed: dict[str, str], found: str, wanted: str) -> None:
    installed["acme"] = found
    assert distribution_fault(wanted) == ""


@pytest.mark.parametrize(
    ("found", "wanted", "fault"),
    [
        ("0.6.9", "acme>=0.6.14", "acme 0.6.9 is installed, needed is acme >=0.6.14"),
        ("4.0.0b35", "acme>=4.0.0b36", "acme 4.0.0b35 is installed, needed is acme >=4.0.0b36"),
        ("4.0", "acme<4,>=3.6", "acme 4.0 is installed, needed is acme <4,>=3.6"),
        (None, "acme>=1", "acme is not installed, needed is acme >=1"),
        (None, "acme", "acme is not installed, needed is acme"),
    ],
)
def test_not_met_says_what_was_found_and_needed(
    installed: dict[str, str], found: str | None, wanted: str, fault: str
) -> None:
    if found is not None:
        installed["acme"] = found
    assert distribution_fault(wanted) == fault


def test_a_text_that_is_no_requirement() -> None:
    assert check_requirement("acme>=1") == ""
    assert "'acme>>1' is not a requirement such as 'triton>=3.6'" in check_requirement("acme>>1")
