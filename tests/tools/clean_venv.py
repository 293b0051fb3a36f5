"""A virtual environment as a stranger has one: enginebay as a wheel, nothing of this tree, and no download.

The heavy libraries are links to the running environment's, since torch is not installed again for a test.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build_wheel(project: Path, out: Path) -> Path:
    """Build a project with what is installed, and return its one wheel."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(project)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (wheel,) = out.glob("*.whl")
    return wheel


class CleanVenv:
    """An environment under `root`, in which programs run from the folder `work`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.work = root / "work"
        self.work.mkdir(parents=True)
        self.bin = root / "venv" / "bin"
        venv.create(root / "venv", symlinks=True)
        places = sysconfig.get_paths(vars={"base": str(root / "venv"), "platbase": str(root / "venv")})
        Path(places["purelib"], "libraries.pth").write_text(f"{_links(root / 'libraries')}\n")
        python = self.bin / "python"
        # without an index and isolated builds, pip misses what is not linked, and holds all to the versions that they demand
        self._program("pip", f'PIP_NO_INDEX=1 PIP_NO_BUILD_ISOLATION=0 {sys.executable} -m pip --python {python} "$@"')
        for module in ("pytest", "mypy", "ruff"):
            self._program(module, f'{sys.executable if module == "ruff" else python} -m {module} "$@"')

    def run(self, program: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment's Python."""
        return self._run([str(self.bin / program), *arguments], cwd)

    def text(self, program: str, *arguments: str, cwd: Path | None = None) -> str:
        """Standard output of a program that must succeed."""
        done = self.run(program, *arguments, cwd=cwd)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def shell(self, script: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run lines of a shell, of which the first that fails ends it."""
        return self._run(["bash", "-ec", f'PATH="{self.bin}:$PATH"\n{script}'], cwd)

    def _program(self, name: str, line: str) -> None:
        (self.bin / name).write_text(f"#!/bin/sh\n{line}\n")
        (self.bin / name).chmod(0o755)

    def _run(self, command: list[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        own = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "ENGINEBAY_", "PYTEST_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        return subprocess.run(
            command, cwd=cwd or self.work, env=environment, capture_output=True, text=True, check=False
        )


def _links(folder: Path) -> Path:
    """Links to all that the running environment has, but enginebay and what is put on its path by ``.pth`` files."""
    folder.mkdir()
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(place).iterdir():
            if not entry.name.startswith(("enginebay", "__pycache__")) and entry.suffix != ".pth":
                (folder / entry.name).symlink_to(entry)
    return folder
