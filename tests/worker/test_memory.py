"""How many blocks fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from enginebay.errors import MemoryBudgetError
from enginebay.worker.memory import (
    RACE_SLACK,
    DeviceMemory,
    KVBudget,
    host_memory_bytes,
    num_kv_blocks,
    out_of_memory_explained,
)
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


BUDGET = KVBudget(
    total=1000, utilization=0.9, outside=180, weights=100, steps=50, workspaces=30, graphs=20, rounding=10
)


def test_the_pool_gets_what_the_other_parts_leave_of_the_limit() -> None:
    assert (BUDGET.limit, BUDGET.pool) == (900, 900 - 180 - 100 - 50 - 30 - 20 - 10)
    assert BUDGET.require(510) == 510


def test_a_budget_that_is_too_small_names_each_part_and_what_would_be_enough() -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        BUDGET.require(560)
    message = str(caught.value)
    for part in (
        "needs 560 bytes",
        "900 bytes",
        "utilization 0.9 of 1000",
        "100 of weights",
        "50 at the peak",
        "30 of further attention workspaces",
        "20 of CUDA graphs",
        "10 of rounding",
        "180 held outside torch",
        "leave 510",
        "by 0.050 at least",
        "lower scheduler.max_num_batched_tokens",
    ):
        assert part in message
    assert replace(BUDGET, utilization=0.9501).require(560) == 560


def test_weights_above_the_limit_leave_a_negative_pool_and_say_so() -> None:
    with pytest.raises(MemoryBudgetError, match=r"2000 of weights.*leave -1390"):
        replace(BUDGET, weights=2000).require(1)


def memory(free: int, reserved: int = 100) -> DeviceMemory:
    return DeviceMemory(free=free, total=RACE_SLACK * 10, reserved=reserved, allocated=reserved)


@given(free=st.integers(0, RACE_SLACK * 10), reserved=st.integers(0, RACE_SLACK))
def test_others_may_take_no_more_than_the_slack(free: int, reserved: int) -> None:
    now = memory(free, reserved)
    grown = now.outside - BUDGET.outside
    if grown <= RACE_SLACK:
        BUDGET.check_others(now)
        return
    with pytest.raises(
        MemoryBudgetError, match=rf"took {grown} bytes .*: 180 were .* now {now.outside} are, and {free} of"
    ):
        BUDGET.check_others(now)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A device of 1000 bytes, 700 of them free, 120 torch's reserve and 80 in tensors; notes what is asked of it."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 120)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 80)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    return calls


def test_what_others_hold_is_counted_once(device: list[str]) -> None:
    read = DeviceMemory.read(torch.device("cuda"))
    assert (read.used, read.outside, read.reserved, read.allocated) == (300, 180, 120, 80)
    assert device == []
    assert DeviceMemory.settled(torch.device("cuda")) == read
    assert device == ["wait", "empty"]


def test_running_out_of_memory_becomes_an_error_with_the_numbers(device: list[str]) -> None:
    def fill() -> None:
        with out_of_memory_explained(torch.device("cuda"), lambda: "5000 bytes of weights", "choose less"):
            raise torch.OutOfMemoryError("tried")

    pattern = r"5000 bytes of weights did not fit cuda: of its 1000 .*torch held 120, .* 180, and 700 .*; choose less \(tried\)"
    with pytest.raises(MemoryBudgetError, match=pattern):
        fill()


def test_other_errors_stay_what_they_are() -> None:
    def fail() -> None:
        with out_of_memory_explained(torch.device("cuda"), lambda: "all", "nothing"):
            raise ValueError("else")

    with pytest.raises(ValueError, match="else"):
        fail()


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
