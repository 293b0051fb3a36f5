"""How many threads a worker on CPU computes with: no more than its processors and its cgroup's share of them.

OpenMP counts the processors that the process may run on, but not the share of their time that a container grants: with more
threads than that, a thread that has used up its share keeps all others waiting at the end of every kernel. It only lowers a
count, and leaves one alone that the user has set.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path, PurePosixPath

import torch

logger = logging.getLogger(__name__)

_CGROUP = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def size_threads() -> None:
    """Lower torch's number of threads, which our kernels share, to what the cgroup grants."""
    if os.environ.get("OMP_NUM_THREADS"):
        return
    before, granted = torch.get_num_threads(), granted_processors()
    if granted is not None and granted < before:
        torch.set_num_threads(max(1, int(granted)))
        logger.info("the cgroup grants %.2f processors: %d threads, not %d", granted, torch.get_num_threads(), before)


def granted_processors(root: Path = _CGROUP, own: Path = _OWN) -> float | None:
    """Processor time a second that the cgroup grants, in seconds; None without a limit.

    A limit of any cgroup above the process's own binds too. Within a container the paths of `own` may be the host's, of which
    only `root` itself is to be seen.
    """
    lines = own.read_text().splitlines() if own.exists() else []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / controllers if controllers else root
        inside = PurePosixPath(path.lstrip("/"))
        for part in (inside, *inside.parents):
            limits.append(_limit(base / part) if controllers == "" else _limit_v1(base / part))
    return min((limit for limit in limits if limit is not None), default=None)


def _limit(group: Path) -> float | None:
    """A version 2 group's: ``<quota> <period>`` in microseconds, the quota ``max`` for none."""
    file = group / "cpu.max"
    if not file.exists():
        return None
    quota, period = file.read_text().split()
    return None if quota == "max" else int(quota) / int(period)


def _limit_v1(group: Path) -> float | None:
    """A version 1 group's: a quota of -1 is none."""
    quota, period = group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us"
    if not (quota.exists() and period.exists()):
        return None
    microseconds = int(quota.read_text())
    return None if microseconds < 0 else microseconds / int(period.read_text())
