from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from enginebay.errors import PluginError
from enginebay.plugins.local import import_local

if TYPE_CHECKING:
    from tests.plugins.conftest import FakeSite

pytestmark = pytest.mark.usefixtures("fake_site")


def test_name_is_unique_by_path_and_content(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "plugin.py").write_text("X = 1\n")
    a, b = (import_local("plugin.py", tmp_path / folder) for folder in ("a", "b"))
    assert a.sha256 == b.sha256
    assert a.module_name != b.module_name
    assert sys.modules[a.module_name] is a.module
    assert import_local("plugin.py", tmp_path / "a").module is a.module


def test_an_edit_of_equal_size_is_seen(tmp_path: Path) -> None:
    """A .pyc checked by time and size would hide it."""
    (tmp_path / "plugin.py").write_text("X = 1\n")
    first = import_local("plugin.py", tmp_path)
    (tmp_path / "plugin.py").write_text("X = 2\n")
    second = import_local("plugin.py", tmp_path)
    assert (first.module.X, second.module.X) == (1, 2)
    assert first.sha256 != second.sha256


@pytest.mark.parametrize("reference", ["pkg", "pkg/__init__.py"])
def test_a_package_imports_its_parts_and_hashes_them(tmp_path: Path, reference: str) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("from .part import X\n")
    (tmp_path / "pkg" / "part.py").write_text("X = 1\n")
    first = import_local(reference, tmp_path)
    assert first.module.X == 1
    assert first.path == tmp_path / "pkg" / "__init__.py"
    (tmp_path / "pkg" / "part.py").write_text("X = 2\n")
    second = import_local(reference, tmp_path)
    assert second.module.X == 2
    assert first.sha256 != second.sha256


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"'nope\.py': there is no file .*nope\.py"):
        import_local("nope.py", tmp_path)


def test_not_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plugin.txt").write_text("")
    with pytest.raises(PluginError, match=r"not a \.py file"):
        import_local("plugin.txt", tmp_path)


@pytest.mark.parametrize("source", ["1 / 0\n", "def broken(:\n", "raise SystemExit(1)\n"])
def test_failing_import_is_a_plugin_error_and_leaves_nothing_c8(tmp_path: Path, source: str) -> None:
    (tmp_path / "plugin.py").write_text(source)
    before = set(sys.modules)
    with pytest.raises(PluginError, match=r"local plugin .*plugin\.py cannot be imported") as caught:
        import_local("plugin.py", tmp_path)
    assert caught.value.__cause__ is not None
    assert {m for m in set(sys.modules) - before if m.startswith("_enginebay_local_")} == set()


def test_file_without_hooks_is_refused(fake_site: FakeSite, tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text("X = 1\n")
    with pytest.raises(PluginError, match="implements no hook"):
        fake_site.loader().add_local("plugin.py", tmp_path)
