"""What stands after ``model:``."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from enginebay.errors import ModelError
from enginebay.models import fetch as fetching
from enginebay.models.catalogue import PackagedModel
from enginebay.models.reference import LoadFormat, resolve_model, resolve_tokenizer

Hub = Callable[[Callable[..., Any]], None]


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "acme" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    def answer(function: Callable[..., Any]) -> None:
        monkeypatch.setattr("huggingface_hub.snapshot_download", function)

    return answer


def raising(error: BaseException) -> Callable[..., NoReturn]:
    def download(*args: Any, **kwargs: Any) -> NoReturn:
        raise error

    return download


def hub_error(kind: str) -> BaseException:
    """An error as huggingface_hub raises it, without the response that its constructor wants."""
    from huggingface_hub import errors

    cls: type[BaseException] = getattr(errors, kind)
    return cls.__new__(cls, kind)


def test_folder(hf_folder: Path) -> None:
    files = resolve_model(str(hf_folder))
    assert (files.kind, files.path, files.gguf_file, files.name) == ("hf_dir", hf_folder, None, "model")
    assert files.note == ""


def test_relative_to_base_dir(hf_folder: Path, tmp_path: Path) -> None:
    assert resolve_model("./acme/model", base_dir=tmp_path).path == hf_folder


def test_gguf_file_and_folder_with_one(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    for reference in (tmp_path / "a.gguf", tmp_path):
        files = resolve_model(str(reference))
        assert (files.kind, files.gguf_path, files.name) == ("gguf", tmp_path / "a.gguf", "a")


def test_folder_with_several_gguf_files(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=r"several GGUF files: a.gguf, b.gguf; name one"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    ("load_format", "lacking"),
    [("auto", "neither config.json nor a .gguf"), ("gguf", "no .gguf file"), ("safetensors", "no config.json")],
)
def test_empty_folder(tmp_path: Path, load_format: LoadFormat, lacking: str) -> None:
    with pytest.raises(ModelError, match=lacking):
        resolve_model(str(tmp_path), load_format=load_format)


def test_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelError, match=r"weights.bin is not a model"):
        resolve_model(str(tmp_path / "weights.bin"))


def test_load_format_decides_where_a_folder_has_both(hf_folder: Path) -> None:
    (hf_folder / "a.gguf").touch()
    assert resolve_model(str(hf_folder)).kind == "hf_dir"
    assert resolve_model(str(hf_folder), load_format="gguf").kind == "gguf"


def test_load_format_refuses_the_other_kind(hf_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ModelError, match="load_format is safetensors"):
        resolve_model(str(tmp_path / "a.gguf"), load_format="safetensors")


def test_local_folder_wins_over_the_hub_and_says_so(hf_folder: Path, tmp_path: Path) -> None:
    files = resolve_model("acme/model", base_dir=tmp_path)
    assert files.path == hf_folder
    assert files.note.startswith(f"acme/model is read from {hf_folder}; the hub's model")


def test_local_folder_wins_over_a_packaged_name_and_says_so(whole: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").touch()
    files = resolve_model("tiny", base_dir=tmp_path)
    assert files.kind == "hf_dir"
    assert "the packaged model of that name" in files.note


def test_packaged_name_is_fetched_once(whole: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    files = resolve_model("tiny")
    assert (files.kind, files.gguf_path, files.name) == ("gguf", whole.path, "tiny")
    monkeypatch.setattr(subprocess, "Popen", None)
    assert resolve_model("tiny", offline=True) == files


def test_packaged_name_offline(whole: PackagedModel) -> None:
    with pytest.raises(ModelError, match=r"tiny is not in the cache .* offline"):
        resolve_model("tiny", offline=True)


def test_packaged_name_with_terms_is_not_fetched_silently(chunked: PackagedModel) -> None:
    with pytest.raises(ModelError, match="enginebay models fetch tiny-chunked --accept-terms"):
        resolve_model("tiny-chunked")


@pytest.mark.parametrize("reference", ["smollm-135m-instruct", "./missing", "missing.gguf", "", "a/b/c"])
def test_nothing_of_that_name(reference: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no model .*Packaged: smollm2-135m-instruct"):
        resolve_model(reference, base_dir=tmp_path)


def test_near_packaged_name_is_suggested(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Did you mean 'smollm2-135m-instruct'"):
        resolve_model("SmolLM2-135M-Instruct.gguf", base_dir=tmp_path)


@pytest.mark.parametrize(("load_format", "weights"), [("auto", True), ("safetensors", True), ("dummy", False)])
def test_hub_id(hub: Hub, tmp_path: Path, load_format: LoadFormat, weights: bool) -> None:
    asked: dict[str, Any] = {}

    def download(repo_id: str, **kwargs: Any) -> str:
        asked.update(kwargs, repo_id=repo_id)
        return str(tmp_path)

    hub(download)
    files = resolve_model("acme/hub-model", load_format=load_format, offline=True)
    assert (files.kind, files.path, files.name) == ("hf_dir", tmp_path, "acme/hub-model")
    assert asked["local_files_only"] is True
    assert "config.json" in asked["allow_patterns"]
    assert ("*.safetensors" in asked["allow_patterns"]) is weights
    assert not any("bin" in pattern or ".py" in pattern for pattern in asked["allow_patterns"])


@pytest.mark.parametrize(
    ("kind", "offline", "message"),
    [
        ("RepositoryNotFoundError", False, "the hub has no model 'acme/gemma-3-270m'.*Did you mean 'gemma3-270m'"),
        ("GatedRepoError", False, "is gated on the hub"),
        ("LocalEntryNotFoundError", True, "not in the hub's cache, and offline is set"),
        (
            "LocalEntryNotFoundError",
            False,
            "the hub cannot be reached.*Packaged|the hub cannot be reached.*Did you mean",
        ),
    ],
)
def test_hub_faults(hub: Hub, kind: str, offline: bool, message: str) -> None:
    hub(raising(hub_error(kind)))
    with pytest.raises(ModelError, match=message):
        resolve_model("acme/gemma-3-270m", offline=offline)


def test_other_network_faults(hub: Hub) -> None:
    hub(raising(ConnectionError("no route")))
    with pytest.raises(ModelError, match="could not be fetched from the hub: no route"):
        resolve_model("acme/hub-model")


def test_tokenizer_folder_needs_no_config(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    files = resolve_tokenizer(str(tmp_path))
    assert (files.kind, files.path) == ("hf_dir", tmp_path)


def test_tokenizer_from_the_hub_brings_no_weights(hub: Hub, tmp_path: Path) -> None:
    asked: list[str] = []

    def download(repo_id: str, *, allow_patterns: list[str], **kwargs: Any) -> str:
        asked.extend(allow_patterns)
        return str(tmp_path)

    hub(download)
    assert resolve_tokenizer("acme/hub-model").path == tmp_path
    assert "*.safetensors" not in asked


def test_tokenizer_of_a_packaged_model(whole: PackagedModel) -> None:
    fetching.fetch(whole)
    assert resolve_tokenizer("tiny").gguf_path == whole.path
