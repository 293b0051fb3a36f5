from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from enginebay.errors import PluginError
from enginebay.plugins.hookspecs import PROVISION_HOOKS
from enginebay.plugins.registry import REGISTRY_FILE, read_registry

ROOT = Path(__file__).parents[2]
GOOD = """
[[plugin]]
kind = "attention"
name = "x"
summary = "s"
install = "pip install x"
source = "https://example.org"
devices = ["cuda"]
status = "stable"
"""


def test_in_tree_plugins_are_exactly_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {
        (group.removeprefix("enginebay."), name): module
        for group, entries in project["entry-points"].items()
        for name, module in entries.items()
        if group.startswith("enginebay.")
    }
    listed = {(p.kind, p.name): Path(p.source).name for p in read_registry() if p.status == "in-tree"}
    assert listed == declared


def test_in_tree_sources_are_folders_that_the_build_strips() -> None:
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    for plugin in read_registry():
        if plugin.status == "in-tree":
            assert str(Path(plugin.source).parent) in hatch["sources"]


def test_in_tree_extras_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for plugin in read_registry():
        if "[" in plugin.install:
            assert plugin.install.partition("[")[2].partition("]")[0] in extras


def test_package_carries_the_root_file() -> None:
    assert REGISTRY_FILE.resolve() == ROOT / "registry.toml"


def test_reads_a_third_party(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(GOOD)
    (plugin,) = read_registry(tmp_path / "r.toml")
    assert plugin.kind in PROVISION_HOOKS
    assert plugin.devices == ("cuda",)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (GOOD.replace('kind = "attention"', 'kind = "atention"'), "kind 'atention' is not one of"),
        (GOOD.replace('"stable"', '"great"'), "status 'great' is not one of"),
        (GOOD.replace("summary", "sumary"), r"plugin\[0\]: .*\['sumary', 'summary'\]"),
        (GOOD + GOOD, "attention:x is listed twice"),
        ("[[plugin", "cannot be read"),
    ],
)
def test_wrong_tables_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(PluginError, match=complaint):
        read_registry(tmp_path / "r.toml")


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"r\.toml: cannot be read"):
        read_registry(tmp_path / "r.toml")
