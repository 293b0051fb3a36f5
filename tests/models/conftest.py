"""A catalogue of two tiny models whose wheels are built here, and a pip that copies them instead of downloading."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from enginebay.models import catalogue
from enginebay.models.catalogue import Chunk, PackagedModel, Terms

CONTENT = bytes(range(256)) * 8


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, chosen by the environment."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("ENGINEBAY_CACHE", str(folder))
    return folder


@pytest.fixture
def wheelhouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only index that pip is configured with: a folder of wheels. The pip that runs is the real one."""
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def make_wheel(wheelhouse: Path) -> Callable[[str, dict[str, bytes]], Path]:
    """Build a wheel of version 1.0 with the given members."""

    def make(project: str, members: dict[str, bytes]) -> Path:
        stem = project.replace("-", "_")
        info = f"{stem}-1.0.dist-info"
        path = wheelhouse / f"{stem}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
            # a wheel whose import would be noticed
            archive.writestr(f"{stem}/__init__.py", b"raise SystemExit('executed')")
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        return path

    return make


@pytest.fixture
def whole(
    cache: Path, make_wheel: Callable[[str, dict[str, bytes]], Path], monkeypatch: pytest.MonkeyPatch
) -> PackagedModel:
    """A packaged model in one wheel, without terms."""
    wheel = make_wheel("tiny-model", {"tiny_model/tiny.gguf": CONTENT})
    model = PackagedModel(
        name="tiny",
        summary="a tiny one",
        licence="Apache-2.0",
        file="tiny.gguf",
        size_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        chunks=(Chunk("tiny-model==1.0", "tiny_model/tiny.gguf", wheel.stat().st_size),),
    )
    monkeypatch.setitem(catalogue.CATALOGUE, model.name, model)
    return model


@pytest.fixture
def chunked(
    whole: PackagedModel, make_wheel: Callable[[str, dict[str, bytes]], Path], monkeypatch: pytest.MonkeyPatch
) -> PackagedModel:
    """A packaged model in two wheels, with terms in a third."""
    for part, piece in ((1, CONTENT[:1000]), (2, CONTENT[1000:])):
        make_wheel(f"tiny-part{part}", {f"tiny_part{part}/data": piece})
    make_wheel(
        "tiny-terms",
        {"tiny_terms/SHA256SUMS": f"{whole.sha256}  tiny.gguf\n".encode(), "tiny_terms/TERMS.html": b"be good"},
    )
    model = replace(
        whole,
        name="tiny-chunked",
        chunks=tuple(Chunk(f"tiny-part{part}==1.0", f"tiny_part{part}/data", 900) for part in (1, 2)),
        terms=Terms(
            notice="Be good.",
            url="https://example.org/terms",
            requirement="tiny-terms==1.0",
            documents=("tiny_terms/TERMS.html",),
            checksums="tiny_terms/SHA256SUMS",
        ),
    )
    monkeypatch.setitem(catalogue.CATALOGUE, model.name, model)
    return model
