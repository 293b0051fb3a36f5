"""What a process has open or running, and what of it is new: threads, processes, files, sockets, shared memory. Linux only.

It knows nothing of executors.
"""

from __future__ import annotations

import gc
import os
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_SHARED_MEMORY = Path("/dev/shm")


def can_be_seen() -> bool:
    """Whether this system says what a process has open."""
    return (_PROC / "self" / "fd").is_dir()


@dataclass(frozen=True)
class Process:
    """A process, told apart from a later one of the same number by when it began."""

    pid: int
    #: in clock ticks since the system started
    began: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The process of that number; None if there is none."""
        found = _stat(pid)
        return None if found is None else cls(pid, found[1])

    @property
    def exists(self) -> bool:
        """Whether it is there still, be it only for its parent to ask how it ended."""
        return Process.of(self.pid) == self


@dataclass(frozen=True)
class Snapshot:
    """What is there at a moment."""

    threads: frozenset[int]
    #: all that descend from this process
    processes: frozenset[Process]
    #: what is open, by name, and how often: files, pipes, sockets
    files: Counter[str]
    #: files of shared memory
    shared: frozenset[str]
    #: socket files that nobody listens to
    sockets: frozenset[str]

    @classmethod
    def take(cls) -> Snapshot:
        """Look."""
        gc.collect()
        return cls(
            threads=frozenset(int(name) for name in os.listdir("/proc/self/task")),
            processes=frozenset(_descendants(os.getpid())),
            files=Counter(_open_files()),
            shared=frozenset(os.listdir(_SHARED_MEMORY)) if _SHARED_MEMORY.is_dir() else frozenset(),
            sockets=frozenset(_dead_sockets()),
        )

    def since(self, before: Snapshot) -> list[str]:
        """What is here and was not `before`, in words."""
        found = [f"thread {n}" for n in sorted(self.threads - before.threads)]
        found += [f"process {p.pid}" for p in self.processes - before.processes]
        found += [f"open {name}" for name in (self.files - before.files).elements()]
        if new := self.shared - before.shared:
            found += [f"shared memory {name}" for name in sorted(new - _used_by_others(new))]
        return found + [f"socket {path}" for path in sorted(self.sockets - before.sockets)]


def left_since(before: Snapshot, also: Iterable[Process] = (), *, patience_s: float = 3.0) -> list[str]:
    """What is new since `before`, and which processes of `also` exist still, after at most `patience_s` for it to go."""
    watched, end = tuple(also), time.monotonic() + patience_s
    while True:
        found = Snapshot.take().since(before)
        found += [f"worker process {process.pid}" for process in watched if process.exists]
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.02)


def _stat(pid: int) -> tuple[int, int] | None:
    """Parent and beginning of a process."""
    try:
        # the name stands in brackets and may hold anything
        words = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(words[1]), int(words[19])


def _descendants(root: int) -> list[Process]:
    children: dict[int, list[Process]] = {}
    for name in os.listdir(_PROC):
        if name.isdigit() and (found := _stat(int(name))) is not None:
            children.setdefault(found[0], []).append(Process(int(name), found[1]))
    out: list[Process] = []
    front = [root]
    while front:
        below = children.get(front.pop(), [])
        out += below
        front += [process.pid for process in below]
    return out


def _open_files() -> list[str]:
    out = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the listing's own
            continue
        out.append(target)
    return out


def _dead_sockets() -> list[str]:
    """Socket files in the folder for temporary files that nobody has bound."""
    bound = {
        line.split()[-1] for line in (_PROC / "net" / "unix").read_text(encoding="utf-8").splitlines() if "/" in line
    }
    return [path for path in _files(tempfile.gettempdir(), 2) if path not in bound and _is_socket(path)]


def _files(folder: str, depth: int) -> list[str]:
    out = []
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return []
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            out += _files(entry.path, depth - 1) if depth > 1 else []
        elif not entry.is_file(follow_symlinks=False):
            out.append(entry.path)
    return out


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return False


def _used_by_others(names: frozenset[str]) -> set[str]:
    """Those files of shared memory that a process has mapped which does not descend from this one."""
    own = {os.getpid(), *(process.pid for process in _descendants(os.getpid()))}
    used: set[str] = set()
    for name in os.listdir(_PROC):
        if not name.isdigit() or int(name) in own:
            continue
        try:
            mapped = (_PROC / name / "maps").read_bytes()
        except OSError:
            continue
        used |= {file for file in names if f"{_SHARED_MEMORY}/{file}".encode() in mapped}
    return used
