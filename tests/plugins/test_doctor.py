from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from enginebay.plugins import catalogue as catalogue_module
from enginebay.plugins.doctor import diagnose

if TYPE_CHECKING:
    from pathlib import Path

    from tests.plugins.conftest import FakeSite


def test_reports_every_plugin_and_never_raises_c15(fake_site: FakeSite) -> None:
    fake_site.attention("fine")
    fake_site.attention("off")
    fake_site.attention("bare", record="requires=('no_such_module_here',), install='bare-kernels'")
    fake_site.clashing()
    fake_site.broken_import()
    fake_site.misspelt_hook()
    fake_site.wrong_api()
    findings = diagnose(fake_site.catalogue("off"))
    assert sorted((f.name, f.status) for f in findings) == [
        ("acme", "conflict"),
        ("acme", "conflict"),
        ("bare", "ok"),
        ("broken", "broken"),
        ("fine", "ok"),
        ("future", "broken"),
        ("misspelt", "broken"),
        ("off", "disabled"),
    ]
    by_name = {f.name: f for f in findings}
    assert by_name["bare"].message == "not usable here: pip install bare-kernels"
    assert by_name["off"].message == "by ENGINEBAY_DISABLE_PLUGINS=off"
    assert [f.name for f in findings if f.is_fault] == ["acme", "acme", "broken", "future", "misspelt"]


def test_traceback_of_a_broken_plugin_is_shown_c8(fake_site: FakeSite) -> None:
    fake_site.broken_import()
    (finding,) = diagnose(fake_site.catalogue())
    assert "Traceback (most recent call last)" in finding.traceback
    assert "import a_module_that_nobody_has" in finding.traceback
    assert (finding.distribution, finding.version) == ("eb-broken", "1.0")


def test_stale_metadata_is_noted_with_both_paths_c9(fake_site: FakeSite) -> None:
    early, live = fake_site.stale()
    (note,) = (f for f in diagnose(fake_site.catalogue()) if f.status == "note")
    assert note.path == str(live)
    assert str(early) in note.message
    assert not note.is_fault


def test_unknown_kinds_and_words_are_noted(fake_site: FakeSite) -> None:
    fake_site.dist_info("eb-x", "1.0", {"attenton": {"x": "m"}})
    notes = diagnose(fake_site.catalogue("nobody"))
    assert {f.status for f in notes} == {"note"}
    assert "knows no kind 'attenton'" in notes[0].message
    assert notes[1].name == "nobody"


def test_damaged_registry_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def read() -> None:
        from enginebay.plugins.registry import read_registry

        read_registry(tmp_path / "gone.toml")

    monkeypatch.setattr(catalogue_module, "read_registry", read)
    (finding,) = diagnose()
    assert finding.is_fault
    assert "gone.toml" in finding.message
