"""What laws about GPUs share."""

from __future__ import annotations

from collections.abc import Callable

import torch

from enginebay.worker.cuda_graphs import capture_stream


def capture(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of `work`, which has run before, so that nothing is compiled while it is captured."""
    side = capture_stream(torch.device("cuda", torch.cuda.current_device()))
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        work()
    return graph
