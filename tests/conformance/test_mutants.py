"""Every law catches what it is for: broken plugins die of the law that is meant for them, and of no other first."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from enginebay.conformance import __all__ as suites
from enginebay.conformance.suite_names import SUITE_OF_KIND

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "mutants.md"
KINDS = list(SUITE_OF_KIND)

_TEST_FILE = """\
from enginebay import conformance
from {module} import MUTANTS, ORIGINALS


def made(name, record):
    return type(name, (conformance.{suite},), {{"load_record": classmethod(lambda cls: (record, None))}})


TestOriginal = made("TestOriginal", ORIGINALS[{device!r}])
for mutant in MUTANTS:
    if mutant.device == {device!r} and mutant.shown_here:
        globals()[f"Test_{{mutant.name}}"] = made(f"Test_{{mutant.name}}", mutant.record)
"""


def mutants_of(kind: str) -> Any:
    return importlib.import_module(f"{kind}_mutants").MUTANTS


def first_broken(kind: str, device: str, folder: Path) -> dict[str, str | None]:
    """The first law that each mutant breaks, by the mutant's record name and class; None: it survived."""
    file = folder / "test_mutants_of_kind.py"
    file.write_text(_TEST_FILE.format(module=f"{kind}_mutants", suite=SUITE_OF_KIND[kind], device=device))
    report = folder / "report.json"
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "first_failure", "-p", "no:cacheprovider"]
    command += ["-o", f"pythonpath={ROOT / 'tests' / 'mutants'}", "--import-mode=importlib", "--rootdir", str(folder)]
    command += [
        "-c",
        str(folder / "pytest.ini"),
        "--enginebay-device",
        device,
        "--enginebay-report",
        str(report),
        str(file),
    ]
    (folder / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, str | None] = {}
    for plugin in json.loads(report.read_text())["plugins"]:
        failed = [law["law"] for law in plugin["laws"] if law["outcome"] == "failed"]
        found[plugin["class"]] = failed[0] if failed else None
    return found


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_every_mutant_dies_of_its_law(kind: str, tmp_path: Path) -> None:
    check_kills(kind, "cpu", tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in ("attention", "sampler")])
def test_every_mutant_on_a_gpu_dies_of_its_law(kind: str, tmp_path: Path) -> None:
    check_kills(kind, "cuda", tmp_path)


def check_kills(kind: str, device: str, folder: Path) -> None:
    found = first_broken(kind, device, folder)
    assert found.pop("TestOriginal") is None
    assert found == {f"Test_{m.name}": m.law for m in mutants_of(kind) if m.device == device and m.shown_here}


@pytest.mark.parametrize("kind", KINDS)
def test_every_law_has_a_mutant(kind: str) -> None:
    from enginebay import conformance
    from enginebay.conformance.suite import laws

    wanted = set(laws(getattr(conformance, SUITE_OF_KIND[kind])))
    assert {m.law for m in mutants_of(kind)} == wanted
    names = [m.name for m in mutants_of(kind)]
    assert len(set(names)) == len(names)


def test_every_suite_is_known_by_its_kind() -> None:
    assert sorted(suites) == sorted(SUITE_OF_KIND.values())


def test_the_kill_table_is_current() -> None:
    assert TABLE.read_text(encoding="utf-8") == table(), "python tests/conformance/test_mutants.py writes it"


def table() -> str:
    """The kill table, as Markdown."""
    lines = [
        "# What the conformance suite catches",
        "",
        "Plugins that are broken in one way each, and the law that finds each first. `make test-full` runs them: a broken",
        "plugin that no law finds, or that another law finds first, fails it.",
        "",
        "Written by `python tests/conformance/test_mutants.py`.",
    ]
    for kind in KINDS:
        lines += ["", f"## {kind}", "", "| what is broken | the law that finds it |", "| --- | --- |"]
        lines += [f"| {m.fault}{'' if m.device == 'cpu' else f' ({m.device})'} | `{m.law}` |" for m in mutants_of(kind)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests" / "mutants"))
    TABLE.write_text(table(), encoding="utf-8")
