from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from enginebay.plugins.report import print_report, report_dict, report_text
from enginebay.plugins.requirements import Requirements
from enginebay.plugins.resolver import resolve
from enginebay.plugins.selection import Selection

if TYPE_CHECKING:
    from tests.plugins.conftest import FakeSite

SCHEDULER = "SchedulerRecord(name='slow', summary='s', factory=print, api_version=0, async_scheduling=False)"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def selections(fake_site: FakeSite, requirements: Requirements) -> list[Selection]:
    fake_site.attention("good", record="priority=5")
    fake_site.attention("cuda", record="devices=('cuda',)")
    fake_site.clashing()
    fake_site.other("scheduler", "enginebay_schedulers", SCHEDULER, "slow")
    loader = fake_site.loader()
    return [
        resolve("attention", "auto", "default", requirements, loader),
        resolve("scheduler", "slow", "yaml", requirements, loader),
        resolve("quant", "auto", "default", requirements, loader),
    ]


def test_text_says_who_whence_how_and_why_not(selections: list[Selection]) -> None:
    lines = report_text(selections).splitlines()
    assert lines[0].split() == ["attention", "good", "eb-good", "1.0", "(auto)"]
    assert "    not cuda: device: wanted cpu, allowed cuda" in lines
    (clash,) = (line for line in lines if line.startswith("    not acme: conflict:"))
    assert "acme-one 1.0" in clash
    assert "acme-two 2.0" in clash
    assert ["scheduler", "slow", "eb-scheduler-slow", "1.0", "(yaml)"] in [line.split() for line in lines]
    assert any(line.startswith("quant") and "the weights are not quantized" in line for line in lines)
    assert lines[-1].startswith(
        "switched off: asynchronous scheduling, by scheduler:slow (eb-scheduler-slow 1.0)"
    )  # C14


def test_dict_is_json(selections: list[Selection]) -> None:
    data = json.loads(json.dumps(report_dict(selections)))
    attention, scheduler, quant = data["bays"]
    assert attention["plugin"]["version"] == "1.0"
    assert {r["name"]: r["reasons"][0]["code"] for r in attention["rejected"]} == {"cuda": "device", "acme": "conflict"}
    assert (scheduler["chosen"], scheduler["source"]) == ("slow", "yaml")
    assert (quant["chosen"], quant["note"]) == (None, "the weights are not quantized")
    assert data["switched_off"][0]["feature"] == "asynchronous scheduling"


def test_prints_text_to_a_file_and_a_table_to_a_terminal(
    selections: list[Selection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    plain, rich = io.StringIO(), Terminal()
    print_report(selections, plain)
    print_report(selections, rich)
    assert plain.getvalue() == report_text(selections) + "\n"
    assert "Parts of this engine" in rich.getvalue()
    for text in ("good", "eb-good 1.0", "device: wanted cpu, allowed cuda", "asynchronous scheduling"):
        assert text in rich.getvalue()


def test_brackets_in_a_plugins_words_are_shown_as_they_are(
    selections: list[Selection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    out = Terminal()
    print_report([replace(selections[2], note="see [bold]x[/bold]")], out)
    assert "see [bold]x[/bold]" in out.getvalue()
