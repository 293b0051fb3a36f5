"""The packaged models' catalogue."""

from __future__ import annotations

from pathlib import Path

import pytest
from enginebay.errors import ModelError
from enginebay.models.catalogue import CATALOGUE, PackagedModel, cache_dir, find


@pytest.mark.parametrize("model", CATALOGUE.values(), ids=CATALOGUE)
def test_entries_are_complete(model: PackagedModel) -> None:
    assert len(bytes.fromhex(model.sha256)) == 32
    assert model.file.endswith(".gguf")
    assert all("==" in chunk.requirement for chunk in model.chunks)
    assert model.download_bytes <= model.size_bytes


def test_smollm2_is_free_and_gemma_has_terms() -> None:
    assert find("smollm2-135m-instruct").terms is None
    assert find("gemma3-270m").terms is not None


def test_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINEBAY_CACHE", str(tmp_path))
    assert find("gemma3-270m").folder == tmp_path / "models" / "gemma3-270m"
    monkeypatch.delenv("ENGINEBAY_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home" / ".cache" / "enginebay"


def test_unknown_name_suggests_the_near_one() -> None:
    with pytest.raises(ModelError, match="Did you mean 'smollm2-135m-instruct'"):
        find("smollm2-135m-instuct")


def test_a_short_file_is_not_cached(whole: PackagedModel) -> None:
    whole.folder.mkdir(parents=True)
    whole.path.write_bytes(b"short")
    assert not whole.is_cached
