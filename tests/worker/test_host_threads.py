"""Threads fit what the cgroup grants."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from enginebay.worker import host_threads
from enginebay.worker.host_threads import granted_processors, size_threads


def tree(root: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in files.items():
        path = root / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (root / "own").write_text(own)
    return root / "cgroup", root / "own"


@pytest.mark.parametrize(
    ("own", "files", "wanted"),
    [
        pytest.param("0::/a/b\n", {"a/b/cpu.max": "150000 100000"}, 1.5, id="v2"),
        pytest.param(
            "0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, 0.5, id="v2_parent_binds"
        ),
        pytest.param("0::/a\n", {"a/cpu.max": "max 100000"}, None, id="v2_none"),
        pytest.param("0::/host/path\n", {"cpu.max": "200000 100000"}, 2.0, id="v2_in_a_container"),
        pytest.param(
            "3:cpuset:/\n2:cpu,cpuacct:/a\n0::/\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "300000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
            3.0,
            id="v1",
        ),
        pytest.param(
            "1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None, id="v1_none"
        ),
        pytest.param("1:cpuset:/a\n", {"cpuset/a/cpu.cfs_quota_us": "1"}, None, id="other_controllers"),
        pytest.param("", {}, None, id="no_cgroup"),
    ],
)
def test_the_tightest_limit_counts(tmp_path: Path, own: str, files: dict[str, str], wanted: float | None) -> None:
    assert granted_processors(*tree(tmp_path, own, files)) == wanted


def test_a_machine_without_cgroups(tmp_path: Path) -> None:
    assert granted_processors(tmp_path, tmp_path / "missing") is None


@pytest.fixture
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("granted", "wanted"), [(2.9, 2), (0.3, 1), (8.0, 4), (None, 4)])
def test_threads_are_lowered_to_whole_processors_and_never_raised(
    four_threads: None, monkeypatch: pytest.MonkeyPatch, granted: float | None, wanted: int
) -> None:
    monkeypatch.setattr(host_threads, "granted_processors", lambda: granted)
    size_threads()
    assert torch.get_num_threads() == wanted


def test_a_count_that_the_user_set_stands(four_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setattr(host_threads, "granted_processors", lambda: 1.0)
    size_threads()
    assert torch.get_num_threads() == 4
