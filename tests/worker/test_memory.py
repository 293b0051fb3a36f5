"""How many blocks fit."""

from __future__ import annotations

import pytest
import torch
from enginebay.errors import MemoryBudgetError
from enginebay.worker.memory import cuda_kv_bytes, host_memory_bytes, num_kv_blocks
from hypothesis import given
from hypothesis import strategies as st


def test_blocks_fill_what_is_there() -> None:
    assert num_kv_blocks(1000, 100, 64, 16, wanted=50) == 10
    assert num_kv_blocks(1099, 100, 64, 16, wanted=50) == 10


def test_no_more_than_wanted_and_the_null_block() -> None:
    assert num_kv_blocks(10**9, 100, 64, 16, wanted=50) == 51


@given(available=st.integers(0, 10**7), block=st.integers(1, 10**4), wanted=st.integers(1, 10**4))
def test_blocks_never_exceed_the_budget(available: int, block: int, wanted: int) -> None:
    if available < 2 * block:
        with pytest.raises(MemoryBudgetError):
            num_kv_blocks(available, block, 64, 16, wanted)
        return
    blocks = num_kv_blocks(available, block, 64, 16, wanted)
    assert 2 <= blocks <= wanted + 1
    assert blocks * block <= available
    assert blocks == wanted + 1 or (blocks + 1) * block > available


@pytest.mark.parametrize("available", [199, 100, 0, -5])
def test_too_little_says_what_is_needed_and_what_to_do(available: int) -> None:
    pattern = (
        rf"has {max(available, 0)} bytes, but needs 200 .*16 tokens; raise cache\.memory_bytes .*lower .*64 takes 400"
    )
    with pytest.raises(MemoryBudgetError, match=pattern):
        num_kv_blocks(available, 100, 64, 16, wanted=50)


def test_cuda_budget_leaves_room_for_other_processes_the_peak_and_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1000, 700 are free and 120 are torch's own reserve: others hold 180, once."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 120)
    assert cuda_kv_bytes(torch.device("cuda"), 0.9, peak_bytes=150, workspace_bytes=30) == 900 - 180 - 150 - 30
    assert cuda_kv_bytes(torch.device("cuda"), 0.2, peak_bytes=150, workspace_bytes=30) < 0


class FakePath:
    """Stands for `pathlib.Path`: files by name, and nothing else exists."""

    files: dict[str, str]

    def __init__(self, name: str) -> None:
        self.name = name

    def exists(self) -> bool:
        return self.name in self.files

    def read_text(self) -> str:
        return self.files[self.name]


MEMINFO = "MemTotal:       8000 kB\nMemFree:        1000 kB\nMemAvailable:   4000 kB\n"
LIMIT, USED = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 4096000),
        ({LIMIT: "max\n", USED: "5\n"}, 4096000),
        ({LIMIT: "2000000\n", USED: "500000\n"}, 1500000),
        ({LIMIT: "9000000000\n", USED: "500000\n"}, 4096000),
        ({LIMIT: "2000000\n"}, 4096000),
        ({LIMIT: "1000\n", USED: "2000\n"}, 0),
    ],
)
def test_host_memory_is_what_is_available_within_the_cgroup(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(FakePath, "files", {"/proc/meminfo": MEMINFO, **files}, raising=False)
    monkeypatch.setattr("enginebay.worker.memory.Path", FakePath)
    assert host_memory_bytes() == expected


def test_host_memory_of_this_machine_is_positive() -> None:
    assert host_memory_bytes() > 0
