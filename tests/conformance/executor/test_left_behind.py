"""What is left behind is seen, whatever it is; what others do is not held against the one who is watched."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
from enginebay.conformance.executor.left_behind import Process, Snapshot, can_be_seen, left_since

pytestmark = pytest.mark.skipif(not can_be_seen(), reason="needs /proc")


@contextmanager
def a_thread() -> Iterator[None]:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    yield
    end.set()
    thread.join()


@contextmanager
def a_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield
    process.communicate(b"\n")


@contextmanager
def a_file() -> Iterator[None]:
    with tempfile.TemporaryFile():
        yield


@contextmanager
def shared_memory() -> Iterator[None]:
    memory = SharedMemory(create=True, size=64)
    memory.close()
    yield
    memory.unlink()


@contextmanager
def a_dead_socket() -> Iterator[None]:
    folder = Path(tempfile.mkdtemp(prefix="eb-"))
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "s"))
    yield
    (folder / "s").unlink()
    folder.rmdir()


@pytest.mark.parametrize(
    ("leave", "word"),
    [
        (a_thread, "thread"),
        (a_process, "process"),
        (a_file, "open"),
        (shared_memory, "shared memory"),
        (a_dead_socket, "socket"),
    ],
)
def test_what_is_left_is_seen(leave: object, word: str) -> None:
    SharedMemory(create=True, size=64).unlink()  # starts the process that watches over shared memory
    before = Snapshot.take()
    assert left_since(before) == []
    with leave():  # type: ignore[operator]
        found = left_since(before, patience_s=0.1)
        assert any(line.startswith(word) for line in found), found
    assert left_since(before) == []


def test_shared_memory_that_another_process_uses_is_not_ours() -> None:
    before = Snapshot.take()
    # a process that does not descend from this one: its parent ends at once
    script = (
        "import os, sys\nif os.fork(): os._exit(0)\nos.setsid()\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "m = SharedMemory(create=True, size=64)\nprint(m.name, flush=True)\nsys.stdin.read()\nm.close()\nm.unlink()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        name = other.stdout.readline().decode().strip()
        assert name in os.listdir("/dev/shm")
        assert [line for line in Snapshot.take().since(before) if name in line] == []
        other.stdin.close()


def test_a_process_is_told_from_a_later_one_of_its_number() -> None:
    own = Process.of(os.getpid())
    assert own is not None
    assert own.exists
    assert not Process(own.pid, own.began + 1).exists
    assert Process.of(2**22 + 1) is None
