"""A third party's package from the outside: wheels in a clean environment, the suite, a launch, and what is said without it.

Then the stranger's path: ``enginebay new``, an edit, ``enginebay conformance run``, ``enginebay run``.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from clean_venv import ROOT, CleanVenv, build_wheel
from enginebay import __version__
from enginebay.plugins.records import Kind
from enginebay.scaffold.package import YAML_KEYS

ACME = ROOT / "examples" / "enginebay-acme"
PROMPTS = ("--prompt", "w5 w6 w7", "--prompt", " ".join(f"w{n}" for n in range(10, 50)), "--max-tokens", "12")


@pytest.fixture(scope="module")
def acme_wheel(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_wheel(ACME, tmp_path_factory.mktemp("acme")))


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> CleanVenv:
    root = tmp_path_factory.mktemp("clean")
    made = CleanVenv(root)
    made.text("pip", "install", "-q", f"{build_wheel(ROOT, root / 'wheel')}[conformance]")
    return made


@pytest.fixture
def acme(venv: CleanVenv, acme_wheel: str) -> CleanVenv:
    venv.text("pip", "install", "-q", "--force-reinstall", "--no-deps", acme_wheel)
    return venv


@pytest.fixture
def engine_yaml(tiny_model: str, tmp_path: Path) -> str:
    """A launch file in which both plugins are named, with options of their own."""
    file = tmp_path / "engine.yaml"
    file.write_text(
        f"model: {tiny_model}\ndtype: float32\n"
        "attention: {backend: acme, options: {rows_at_once: 1}}\n"
        "scheduler: {policy: acme_sjf, options: {tokens_per_arrival: 2}}\n"
    )
    return str(file)


@pytest.fixture(scope="module")
def plain(venv: CleanVenv, tiny_model: str) -> str:
    """The answers on the parts that enginebay brings along."""
    text = venv.text("enginebay", "run", "--set", f"model={tiny_model}", "--set", "dtype=float32", *PROMPTS)
    assert len(text.splitlines()) == 2
    return text


def test_the_environment_has_the_wheel_and_nothing_of_this_tree(acme: CleanVenv) -> None:
    code = "import enginebay, enginebay_acme, enginebay_llama; print(enginebay.__file__, enginebay_acme.__file__)"
    for place in acme.text("python", "-c", code).split():
        assert Path(place).is_relative_to(acme.root / "venv")
    plugins = json.loads(acme.text("enginebay", "plugins", "list", "--json"))
    assert plugins["notes"] == []
    ours = {(p["kind"], p["name"]) for p in plugins["plugins"] if p["distribution"] == "enginebay-acme"}
    assert ours == {("attention", "acme"), ("scheduler", "acme_sjf")}
    assert "no fault found" in acme.text("enginebay", "plugins", "doctor")


def test_a_launch_file_that_names_both_changes_no_answer(acme: CleanVenv, engine_yaml: str, plain: str) -> None:
    done = acme.run("enginebay", "run", engine_yaml, *PROMPTS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain
    parts = {line.split()[0]: line.split()[1:4] for line in done.stderr.splitlines() if "enginebay-acme" in line}
    assert parts == {
        "attention": ["acme", "enginebay-acme", "0.2.0"],
        "scheduler": ["acme_sjf", "enginebay-acme", "0.2.0"],
    }


def test_an_option_that_is_not_its_own_is_refused_by_name(acme: CleanVenv, engine_yaml: str) -> None:
    done = acme.run("enginebay", "run", engine_yaml, "--set", "scheduler.options.tokens_per_arival=1", *PROMPTS)
    assert done.returncode == 1
    assert "tokens_per_arival" in done.stderr
    assert "did you mean tokens_per_arrival?" in done.stderr


@pytest.mark.parametrize("plugin", ["attention:acme", pytest.param("scheduler:acme_sjf", marks=pytest.mark.full)])
def test_the_suite_judges_it_without_a_test_file(acme: CleanVenv, plugin: str, tmp_path: Path) -> None:
    acme.text("enginebay", "conformance", "run", plugin, "--report", "json", "--out", str(tmp_path))
    (report,) = json.loads((tmp_path / f"conformance-{plugin.replace(':', '-')}.json").read_text())["plugins"]
    assert (report["verdict"], report["distribution"], report["version"]) == ("passed", "enginebay-acme", "0.2.0")


def test_its_own_tests_pass(acme: CleanVenv) -> None:
    """Of the laws, which are run above, only that they are found is of interest here."""
    files = [str(ACME / "tests" / name) for name in ("test_attention.py", "test_policy.py")]
    done = acme.text("pytest", "-p", "no:cacheprovider", "-q", *files, "-k", "factory or policy")
    assert "6 passed" in done


@pytest.mark.full
def test_its_code_is_typed_and_formatted(acme: CleanVenv, tmp_path: Path) -> None:
    copy = shutil.copytree(ACME, tmp_path / "acme", ignore=shutil.ignore_patterns("__pycache__", ".*"))
    done = acme.shell("mypy\nruff check\nruff format --check", copy)
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_it_the_launch_is_refused_and_says_what_there_is(acme: CleanVenv, engine_yaml: str) -> None:
    acme.text("pip", "uninstall", "-q", "-y", "enginebay-acme")
    done = acme.run("enginebay", "run", engine_yaml, *PROMPTS)
    assert done.returncode == 1
    assert "no installed plugin of the kind attention is named 'acme'" in done.stderr
    assert f"found: flash_attention (enginebay {__version__} at {acme.root}" in done.stderr
    assert f"torch (enginebay {__version__} at" in done.stderr
    assert "Traceback" not in done.stderr
    only_policy = ("--set", "attention.backend=torch", "--set", "attention.options={}")
    done = acme.run("enginebay", "explain", engine_yaml, *only_policy)
    assert done.returncode == 1
    assert "no installed plugin of the kind scheduler is named 'acme_sjf'" in done.stderr
    assert f"found: fcfs (enginebay {__version__} at" in done.stderr


#: kind -> the file to edit, an edit that is wrong, and the law that says so
EDITS = {
    "attention": ("backend.py", "return keys > queries[:, None]", "return keys >= queries[:, None].clamp(min=1)"),
    "scheduler": ("policy.py", "return max(running, key=self.admission_key)", "return None  # type: ignore"),
}
CAUGHT = {"attention": "output_equals_float32", "scheduler": "victims_are_pure"}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.full] * (kind != "attention")) for kind in YAML_KEYS]
)
def test_the_strangers_path(venv: CleanVenv, kind: Kind, tiny_model: str, plain: str, tmp_path: Path) -> None:
    name = f"mine_{kind}"
    said = venv.text("enginebay", "new", kind, name, cwd=tmp_path)
    folder = tmp_path / f"enginebay-mine-{kind}"
    commands = [line.strip() for line in said.splitlines()[2:]]
    assert f"install -e './enginebay-mine-{kind}[dev]'" in commands[0]
    venv.text("pip", "install", "-q", "-e", f"{folder}[dev]")
    assert f"conformance run {kind}:{name}" in commands[1]

    file, right, wrong = EDITS[kind]
    source = folder / "src" / f"enginebay_{name}" / file
    text = source.read_text()
    assert text.count(right) == 1
    source.write_text(text.replace(right, wrong))
    done = venv.run("enginebay", "conformance", "run", f"{kind}:{name}")
    assert done.returncode == 1, done.stdout
    assert f"test_{CAUGHT[kind]}" in done.stdout

    source.write_text(text.replace("Slow, and easy", "Mine, and easy"))
    assert f"{kind}:{name} on cpu, core: passed" in venv.text("enginebay", "conformance", "run", f"{kind}:{name}")
    assert f"--set {YAML_KEYS[kind]}={name}" in commands[2]
    chosen = ("--set", f"{YAML_KEYS[kind]}={name}", "--set", f"model={tiny_model}", "--set", "dtype=float32")
    assert venv.text("enginebay", "run", *chosen, *PROMPTS) == plain
    assert "passed" in venv.text("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=folder)
