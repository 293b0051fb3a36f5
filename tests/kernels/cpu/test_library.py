"""Building the CPU kernels: cached, and replaced by the torch twins, aloud, where that fails."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from enginebay.kernels.cpu import library as module
from enginebay.kernels.cpu import ops


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ENGINEBAY_CACHE", str(tmp_path))
    module.library.cache_clear()
    yield tmp_path
    module.library.cache_clear()


def test_without_a_compiler_the_twins_run_and_a_warning_says_so(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    with caplog.at_level(logging.WARNING):
        assert module.library() is None
    assert "torch twins" in caplog.text
    assert not ops.usable(torch.randn(2, 2))
    assert not ops.decodes("cpu", torch.float32)


def test_a_source_that_does_not_compile_is_reported(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = fresh / "broken.cpp"
    broken.write_text("this is not C++")
    monkeypatch.setattr(module, "SOURCES", (broken,))
    with caplog.at_level(logging.WARNING):
        found = module.library()
    assert found is None
    assert "torch twins" in caplog.text


def test_a_named_compiler_is_never_replaced(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -v")
    with caplog.at_level(logging.WARNING):
        assert module.library() is None
    assert "CXX=no-such-compiler -v is not found" in caplog.text
    assert "correct or unset CXX" in caplog.text


def test_a_compiler_that_says_nothing_is_named(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "false")
    with caplog.at_level(logging.WARNING):
        assert module.library() is None
    assert "could not be built with" in caplog.text
    assert "non-zero exit status 1" in caplog.text


def test_a_damaged_file_is_built_anew(fresh: Path) -> None:
    compiler = module._compiler()
    if compiler is None:
        pytest.skip("no C++ compiler here: the kernels cannot be built")
    built = module._built(compiler)
    built.write_bytes(b"damaged")
    assert module.library() is not None
    assert built.read_bytes()[:4] == b"\x7fELF"


def test_it_is_built_once(fresh: Path) -> None:
    if module.library() is None:
        pytest.skip("no C++ compiler here: the kernels cannot be built")
    built = list((fresh / "kernels").iterdir())
    assert [path.suffix for path in built] == [".so"]
    first = built[0].stat().st_mtime_ns
    module.library.cache_clear()
    assert module.library() is not None
    assert built[0].stat().st_mtime_ns == first
