"""A decode step of one size, captured in a CUDA graph.

The batch's buffers keep their addresses, so a replay reads whatever `SlotBatch.apply` and the backends' `plan` wrote
before it. A step with fewer rows than the size is filled up with padding rows (seq_len 1, null block, slot -1).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from enginebay.interfaces.attention import PlanState
from enginebay.interfaces.batch import Batch, Bucket
from enginebay.interfaces.scheduler import NewBlocks, SchedulerOutput

if TYPE_CHECKING:
    from enginebay.worker.model_runner import ModelRunner

#: Eager runs before a capture, in which libraries allocate and tune.
_WARMUP_RUNS = 2


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which all sizes warm up and are captured: for each one that it meets, cuBLAS keeps some 32 MiB."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def padding_step(num_groups: int) -> SchedulerOutput:
    """A step without rows, which `SlotBatch.apply` fills with padding."""
    none = np.zeros(0, dtype=np.int32)
    return SchedulerOutput(
        step=-1,
        new_requests=[],
        slots=none,
        num_scheduled_tokens=none,
        num_computed_tokens=none,
        num_decode_rows=0,
        samples=np.zeros(0, dtype=np.bool_),
        output_index=none,
        new_blocks=tuple(NewBlocks(none, none, none) for _ in range(num_groups)),
    )


class DecodeGraph:
    """One captured size."""

    def __init__(self, size: int, runner: ModelRunner) -> None:
        self.size = size
        self._runner = runner
        bucket = Bucket(size, 1, captured=True)
        #: decode states of this size; the prefill half is never used, a captured step has decode rows only
        self.states: tuple[tuple[PlanState, PlanState], ...] = tuple(
            (state, state) for state in (r.decode.make_state(bucket) for r in runner.runtimes)
        )
        self._graph = torch.cuda.CUDAGraph()
        self._batch: Batch | None = None
        self._logits: Tensor | None = None

    @torch.inference_mode()
    def capture(self, pool: Any = None) -> Any:
        """Warm up, capture, and return the memory pool for the next size to share."""
        runner = self._runner
        # The batch object is kept: the graph reads the tensors that it views.
        self._batch = runner.batch.apply(padding_step(len(runner.batch.block_tables)), padded_rows=self.size)
        runner.plan(self._batch, self.states)
        side = capture_stream(runner.batch.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARMUP_RUNS):
                runner.forward(self._batch)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self._graph, pool=pool, stream=side):
            self._logits = runner.forward(self._batch)
        return self._graph.pool()

    def replay(self) -> Tensor:
        """Run the step that was applied and planned; logits ``[size, V]``, overwritten by the next replay."""
        self._graph.replay()
        assert self._logits is not None
        return self._logits
