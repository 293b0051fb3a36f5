"""The report of a conformance run: which plugin, which laws, what became of each.

The verdict on a plugin is ``failed`` if any case failed. It is ``passed`` only if no law was left out and those that run the
part (`Conformance.decisive`) did run; a run that proves nothing is ``not judged``.
"""

from __future__ import annotations

import datetime
import json
import platform
from collections import Counter
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from enginebay import __version__
from enginebay.conformance.suite import Conformance, Settings, hardware

if TYPE_CHECKING:
    import pytest

Outcome = Literal["passed", "failed", "skipped", "known failure"]
Verdict = Literal["passed", "failed", "not judged"]
#: the order in which an outcome decides a law's: one failed case is the law's failure
_WORST: tuple[Outcome, ...] = ("failed", "known failure", "passed", "skipped")


@dataclass
class LawResult:
    """A law on one plugin."""

    law: str
    #: its first sentence
    says: str
    cases: Counter[Outcome] = field(default_factory=Counter)
    #: why cases were skipped or failed, each once
    reasons: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> Outcome | Literal["not run"]:
        """The worst of its cases."""
        return next((outcome for outcome in _WORST if self.cases[outcome]), "not run")


class Report:
    """Results of a run, by class and law."""

    def __init__(self) -> None:
        self._laws: dict[type[Conformance], dict[str, LawResult]] = {}
        self._seen: dict[str, Outcome] = {}

    def expect(self, suite: type[Conformance], law: str, text: str) -> None:
        """Say that a case of a law will run."""
        says = " ".join(text.split("\n\n")[0].split())
        self._laws.setdefault(suite, {}).setdefault(law, LawResult(law, says))

    def note(self, suite: type[Conformance], law: str, outcome: pytest.TestReport) -> None:
        """Take the result of a case's set-up, call or end."""
        became = _outcome(outcome)
        if became is None:
            return
        result = self._laws[suite].get(law)
        if result is None:  # a further test of the author's
            return
        before = self._seen.get(outcome.nodeid)
        if before is not None:  # its end failed after its call passed
            result.cases[before] -= 1
        self._seen[outcome.nodeid] = became
        result.cases[became] += 1
        reason = _reason(outcome)
        if reason and reason not in result.reasons:
            result.reasons.append(reason)

    def verdict(self, suite: type[Conformance]) -> Verdict:
        """What the run says of a plugin."""
        outcomes = {law: result.outcome for law, result in self._laws[suite].items()}
        if "failed" in outcomes.values():
            return "failed"
        if "not run" in outcomes.values() or any(outcomes.get(law) != "passed" for law in suite.decisive):
            return "not judged"
        return "passed"

    def lines(self, settings: Settings) -> list[str]:
        """For the terminal."""
        out = []
        for suite, laws in self._laws.items():
            counts = Counter(result.outcome for result in laws.values())
            cases = sum((result.cases for result in laws.values()), Counter[Outcome]())
            laws_text = ", ".join(f"{n} {outcome}" for outcome, n in counts.most_common())
            out.append(
                f"{_name(suite)} on {settings.device}, {settings.level}: {self.verdict(suite)} "
                f"({len(laws)} laws: {laws_text}; {cases.total()} cases)"
            )
        return out

    def data(self, settings: Settings) -> dict[str, Any]:
        """Everything, for programs."""
        return {
            "enginebay": __version__,
            "torch": metadata.version("torch"),
            "python": platform.python_version(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": settings.device,
            "hardware": hardware(settings.device).name,
            "level": settings.level,
            "exhaustive": settings.exhaustive,
            "plugins": [self._plugin(suite) for suite in self._laws],
        }

    def _plugin(self, suite: type[Conformance]) -> dict[str, Any]:
        record, identity = suite.tried()
        return {
            "class": suite.__name__,
            "kind": suite.kind,
            "name": record.name,
            "distribution": identity.distribution if identity else "",
            "version": identity.version if identity else "",
            "sha256": identity.sha256 if identity else "",
            "api_version": record.api_version,
            "verdict": self.verdict(suite),
            "laws": [
                {
                    "law": result.law,
                    "says": result.says,
                    "outcome": result.outcome,
                    "cases": {outcome: n for outcome, n in result.cases.items() if n},
                    "reasons": result.reasons,
                }
                for result in self._laws[suite].values()
            ],
        }

    def write(self, path: Path, settings: Settings) -> None:
        """Write it as JSON or Markdown, by the file's suffix."""
        data = self.data(settings)
        text = json.dumps(data, indent=2) + "\n" if path.suffix == ".json" else markdown(data)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def markdown(data: dict[str, Any]) -> str:
    """A report for people, from its data."""
    out = []
    for plugin in data["plugins"]:
        origin = " ".join(filter(None, (plugin["distribution"], plugin["version"], plugin["sha256"][:12])))
        out += [
            f"# {plugin['kind']}:{plugin['name']}: {plugin['verdict']}",
            "",
            f"{origin or 'given as a record'}, {plugin['kind']} API {plugin['api_version']}; enginebay {data['enginebay']}, "
            f"torch {data['torch']}, Python {data['python']}; on {data['device']} ({data['hardware']}), level {data['level']}"
            f"{', exhaustive' if data['exhaustive'] else ''}; {data['date']}.",
            "",
            "| law | | cases | what it says |",
            "| --- | --- | --- | --- |",
        ]
        for law in plugin["laws"]:
            cases = ", ".join(f"{n} {outcome}" for outcome, n in law["cases"].items())
            why = f" *{_cell('; '.join(law['reasons']))}*" if law["reasons"] else ""
            out.append(f"| `{law['law']}` | {law['outcome']} | {cases} | {_cell(law['says'])}{why} |")
        out.append("")
    return "\n".join(out)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _name(suite: type[Conformance]) -> str:
    return f"{suite.kind}:{suite.tried()[0].name}"


def _outcome(report: pytest.TestReport) -> Outcome | None:
    """What this part of a case says of it; None where a later part will."""
    if report.failed:
        return "failed"
    if report.skipped:
        return "known failure" if hasattr(report, "wasxfail") else "skipped"
    return "passed" if report.when == "call" else None


def _reason(report: pytest.TestReport) -> str:
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        return str(crash.message).splitlines()[0] if crash else str(report.longrepr).strip().splitlines()[-1]
    if hasattr(report, "wasxfail"):
        return str(report.wasxfail)
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return ""
