"""The model runner: one step from a `SchedulerOutput` to sampled ids on the device.

Prepare the batch, plan each plan group, run the model eagerly or replay a captured graph, sample. It knows the model as
`CausalLM` and the backends as `AttentionBackend`; which ones they are was decided before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from enginebay.errors import ExecutorError
from enginebay.interfaces.attention import PlanState
from enginebay.interfaces.batch import Batch, Bucket
from enginebay.interfaces.model import CausalLM
from enginebay.interfaces.scheduler import SchedulerOutput
from enginebay.layers.attention import AttentionRuntime
from enginebay.sampling.sampler import sample
from enginebay.worker.batch import SlotBatch
from enginebay.worker.cuda_graphs import DecodeGraph


class ModelRunner:
    """Runs steps of one rank.

    Parameters
    ----------
    model
        The loaded network, its attention layers bound to `runtimes`.
    batch
        The rank's buffers.
    runtimes
        One a plan group.
    max_num_tokens
        Most tokens a step.
    """

    def __init__(
        self, model: CausalLM, batch: SlotBatch, runtimes: Sequence[AttentionRuntime], max_num_tokens: int
    ) -> None:
        self.model = model
        self.batch = batch
        self.runtimes = tuple(runtimes)
        rows = batch.max_num_rows
        self._eager_states: tuple[tuple[PlanState, PlanState], ...] = tuple(
            (r.decode.make_state(Bucket(rows, 1)), r.prefill.make_state(Bucket(rows, max_num_tokens)))
            for r in self.runtimes
        )
        self._graphs: dict[int, DecodeGraph] = {}
        #: captured sizes, ascending
        self.graph_sizes: tuple[int, ...] = ()
        self._pending: tuple[SchedulerOutput, Tensor | None] | None = None

    def capture(self, sizes: Sequence[int]) -> None:
        """Capture a decode step at each of `sizes` rows, largest first so that they share one memory pool."""
        pool = None
        for size in sorted(set(sizes), reverse=True):
            graph = DecodeGraph(size, self)
            pool = graph.capture(pool)
            self._graphs[size] = graph
        self.graph_sizes = tuple(sorted(self._graphs))

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> None:
        """Run a step as far as its logits."""
        size = self._graph_size(output)
        if size is None:
            batch = self.batch.apply(output)
            self.plan(batch, self._eager_states)
            logits: Tensor | None = None
            if output.samples.any():
                logits = self.forward(batch)
            else:  # every row is amid its prompt
                self.model(batch.input_ids, batch.positions)
        else:
            graph = self._graphs[size]
            batch = self.batch.apply(output, padded_rows=size)
            self.plan(batch, graph.states)
            logits = graph.replay()[: output.num_rows]
        self.batch.advance(output)
        self._pending = (output, logits)

    @torch.inference_mode()
    def sample(self) -> tuple[SchedulerOutput, Tensor | None]:
        """Sample the step that `execute` ran last: int64 ``[R]`` on the device, None if no row samples.

        Ids of rows that do not sample are undefined.
        """
        if self._pending is None:
            raise ExecutorError("sample was called before execute_model")
        (output, logits), self._pending = self._pending, None
        if logits is None:
            return output, None
        token_ids = sample(logits, self.batch.sampling_rows(output))
        self.batch.store_sampled(output, token_ids)
        return output, token_ids

    # --- parts of a step, shared with capture --------------------------------------------------------------------------

    def plan(self, batch: Batch, states: Sequence[tuple[PlanState, PlanState]]) -> None:
        """Hand the step to every plan group and let its backends prepare."""
        for runtime, (decode_state, prefill_state) in zip(self.runtimes, states, strict=True):
            runtime.batch = batch
            runtime.decode_state, runtime.prefill_state = decode_state, prefill_state
            if batch.decode is not None:
                runtime.decode.plan(batch.decode, decode_state)
            if batch.prefill is not None:
                runtime.prefill.plan(batch.prefill, prefill_state)

    def forward(self, batch: Batch) -> Tensor:
        """The model's logits at each row's last token, ``[R, V]``."""
        hidden = self.model(batch.input_ids, batch.positions)
        if batch.num_tokens != batch.num_rows:
            hidden = hidden[batch.logits_indices]
        return self.model.compute_logits(hidden)

    def _graph_size(self, output: SchedulerOutput) -> int | None:
        rows = output.num_rows
        if not self.graph_sizes or output.num_decode_rows != rows or rows > self.graph_sizes[-1]:
            return None
        return next(size for size in self.graph_sizes if size >= rows)
