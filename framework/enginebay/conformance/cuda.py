"""What laws about GPUs share."""

from __future__ import annotations

from collections.abc import Callable

import torch


def capture(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of `work`, which has run before, so that nothing is compiled while it is captured."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph
