"""``enginebay conformance run``: the suite on one plugin, without a test file of the author's.

It writes the three-line test file that an author would write, and runs pytest on it in a process of its own, away from
any configuration of the folder that it is called from.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from enginebay.conformance.suite_names import SUITE_OF_KIND
from enginebay.errors import EngineBayError
from enginebay.plugins.catalogue import Catalogue
from enginebay.plugins.loader import PluginLoader

ReportKind = Literal["junit", "json", "md"]
REPORTS: tuple[ReportKind, ...] = ("junit", "json", "md")

_TEST_FILE = '''\
"""Written by ``enginebay conformance run``."""

from enginebay.conformance import {suite}


class Test{title}({suite}):
    plugin = {plugin!r}
    local = {local!r}
'''


def run(
    kind: str,
    name: str,
    *,
    local: str = "",
    device: str = "cpu",
    level: str = "core",
    exhaustive: bool = False,
    reports: Sequence[ReportKind] = (),
    out: Path = Path(),
    laws: str = "",
    verbose: bool = False,
) -> int:
    """Run the suite; returns 0 only if every law held and the part itself was run.

    Parameters
    ----------
    kind, name
        The plugin.
    local
        The plugin file that provides it, where it is not installed.
    device, level, exhaustive
        As `suite.Settings` has them.
    reports, out
        Which reports to write, and the folder that they go to.
    laws
        Only laws whose name matches this expression, as pytest's ``-k`` takes it.
    verbose
        A line a case.
    """
    require_pytest()
    suite = SUITE_OF_KIND.get(kind)
    if suite is None:
        raise EngineBayError(
            f"there is no conformance suite of the kind {kind!r}; there are {', '.join(SUITE_OF_KIND)}"
        )
    require_plugin(kind, name, local)
    out = out.resolve()
    stem = out / f"conformance-{kind}-{name}"
    with tempfile.TemporaryDirectory(prefix="enginebay-conformance-") as folder:
        file = Path(folder) / "test_conformance.py"
        title = "".join(part.capitalize() for part in f"{kind}_{name}".replace("-", "_").split("_"))
        resolved = str(Path(local).expanduser().resolve()) if local else ""
        file.write_text(_TEST_FILE.format(suite=suite, title=title, plugin=name, local=resolved), encoding="utf-8")
        (Path(folder) / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n", encoding="utf-8")
        verdict = Path(folder) / "verdict.json"
        command = [
            sys.executable,
            "-m",
            "pytest",
            str(file),
            "-c",
            str(Path(folder) / "pytest.ini"),
            "-p",
            "no:cacheprovider",
        ]
        command += ["--rootdir", folder, "--tb=short", "-v" if verbose else "-q"]
        if not _is_registered():
            command += ["-p", "enginebay.conformance.pytest_plugin"]
        command += ["--enginebay-device", device, "--enginebay-level", level, "--enginebay-report", str(verdict)]
        command += ["--enginebay-exhaustive"] * exhaustive
        command += ["-k", laws] if laws else []
        for report in reports:
            out.mkdir(parents=True, exist_ok=True)
            command += [f"--junitxml={stem}.xml"] if report == "junit" else ["--enginebay-report", f"{stem}.{report}"]
        status = subprocess.run(command, check=False).returncode
        for report in reports:
            print(f"report: {stem}.{'xml' if report == 'junit' else report}")  # noqa: T201 - the command's own output
        return _status(status, verdict)


def _status(pytest_status: int, verdict: Path) -> int:
    """0: passed; 1: a law failed; 2: nothing was proved; else pytest's own."""
    import json

    if pytest_status not in (0, 1) or not verdict.exists():
        return pytest_status or 2
    found = [plugin["verdict"] for plugin in json.loads(verdict.read_text(encoding="utf-8"))["plugins"]]
    if pytest_status:
        return 1
    return 0 if found and all(text == "passed" for text in found) else 2


def require_pytest() -> None:
    """Raise `EngineBayError` where pytest is missing."""
    missing = [module for module in ("pytest", "hypothesis") if importlib.util.find_spec(module) is None]
    if missing:
        raise EngineBayError(
            f"the conformance suite needs {' and '.join(missing)}: pip install 'enginebay[conformance]'"
        )


def require_plugin(kind: str, name: str, local: str) -> None:
    """Raise what loading the plugin raises: one message that says it, before pytest shows it as a failure of collection."""
    loader = PluginLoader(Catalogue.discover())
    if local:
        loader.add_local(local)
    loader.load(kind, name)


def _is_registered() -> bool:
    """Whether pytest finds the plugin by entry point: not so in a tree that was never installed."""
    from importlib.metadata import entry_points

    return any(entry.value == "enginebay.conformance.pytest_plugin" for entry in entry_points(group="pytest11"))
