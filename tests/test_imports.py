"""The import rules: what may import what, read from the source; and what an import loads, seen in a fresh process."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = ROOT / "framework" / "enginebay"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = [ROOT / source for source in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["sources"]]
PLUGINS = sorted(init.parent for source in SOURCES[1:] for init in source.glob("*/__init__.py"))
IN_TREE = [
    (group.removeprefix("enginebay."), name)
    for group, entries in PROJECT["project"]["entry-points"].items()
    if group.startswith("enginebay.")
    for name in entries
]

#: libraries that take long to import, or need a device
HEAVY = ("torch", "transformers", "triton", "flashinfer", "flash_attn", "ray", "gguf")
#: what a plugin may import of the core; a name stands for what is below it too
OPEN_TO_PLUGINS = (
    "enginebay.errors",
    "enginebay.interfaces",
    "enginebay.kernels",
    "enginebay.kv_cache",
    "enginebay.layers",
    "enginebay.loading",
    "enginebay.plugins.hookspecs",
    "enginebay.plugins.records",
    "enginebay.plugins.requirements",
)


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Every absolute module name that a file imports, anywhere in it; ``from a import b`` gives ``a`` and ``a.b``."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            assert node.module is not None
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def is_below(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def violations(files: Iterator[Path], forbidden: tuple[str, ...]) -> list[str]:
    return [
        f"{file.relative_to(ROOT)}:{line}: {module}"
        for file in files
        for line, module in imports(file)
        if any(is_below(module, package) for package in forbidden)
    ]


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    path = f"import sys\nsys.path[:0] = {[str(source) for source in SOURCES]!r}\n"
    return subprocess.run([sys.executable, "-c", path + program], capture_output=True, text=True, check=False)


def test_the_scan_sees_a_forbidden_import(tmp_path: Path) -> None:
    file = ROOT / "tests" / "test_imports.py"
    assert violations(iter([file]), ("tomllib",)) != []
    assert violations(iter([file]), ("tom",)) == []
    (tmp_path / "relative.py").write_text("from . import x\n")
    with pytest.raises(AssertionError, match="relative import"):
        list(imports(tmp_path / "relative.py"))


def test_the_plugin_system_imports_nothing_heavy_and_no_interface() -> None:
    closed = (*HEAVY, "enginebay.interfaces", "enginebay.engine", "enginebay.worker", "enginebay.layers")
    assert violations((CORE / "plugins").rglob("*.py"), closed) == []


def test_the_core_imports_no_plugin() -> None:
    assert violations(CORE.rglob("*.py"), tuple(plugin.name for plugin in PLUGINS)) == []


def test_interfaces_import_no_part_that_implements_them() -> None:
    closed = ("enginebay.engine", "enginebay.scheduling", "enginebay.worker", "enginebay.cli")
    assert violations((CORE / "interfaces").rglob("*.py"), closed) == []


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)
def test_a_plugin_imports_only_what_is_open_to_all(folder: Path) -> None:
    wrong = []
    for file in sorted(folder.rglob("*.py")):
        for line, module in imports(file):
            top = module.partition(".")[0]
            other_plugin = top in {plugin.name for plugin in PLUGINS} - {folder.name}
            own_door = module in ("enginebay", "enginebay.hookimpl") or any(
                is_below(module, m) for m in OPEN_TO_PLUGINS
            )
            # "from enginebay.plugins import records" yields enginebay.plugins too: its names decide
            package_only = any(is_below(m, module) for m in OPEN_TO_PLUGINS)
            if other_plugin or (top == "enginebay" and not own_door and not package_only):
                wrong.append(f"{file.relative_to(ROOT)}:{line}: {module}")
    assert wrong == []


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)
def test_a_plugins_init_imports_nothing_heavy(folder: Path) -> None:
    done = run_python(
        f"import {folder.name}\nheavy = sorted(set({HEAVY!r}) & set(sys.modules))\nassert not heavy, heavy\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("kind", "name"), IN_TREE)
def test_an_in_tree_plugin_loads_by_the_common_door_without_torch(kind: str, name: str) -> None:
    done = run_python(
        "from enginebay.plugins.loader import PluginLoader\n"
        f"record = PluginLoader().load({kind!r}, {name!r}).record\n"
        f"heavy = sorted(set({HEAVY!r}) & set(sys.modules))\n"
        "assert not heavy, heavy\n"
    )
    assert done.returncode == 0, done.stderr


def test_the_package_and_its_plugin_system_import_nothing_heavy() -> None:
    modules = ["enginebay", "enginebay.cli"]
    modules += [f"enginebay.plugins.{file.stem}" for file in (CORE / "plugins").glob("*.py") if file.stem != "__init__"]
    done = run_python(
        "import importlib\n"
        f"for module in {modules!r}:\n    importlib.import_module(module)\n"
        f"heavy = sorted(set({HEAVY!r}) & set(sys.modules))\n"
        "assert not heavy, heavy\n"
    )
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_no_pydantic() -> None:
    """It takes longer than all of `enginebay`; only records and configuration need it."""
    done = run_python("import enginebay\nassert 'pydantic' not in sys.modules\n")
    assert done.returncode == 0, done.stderr
