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
from enginebay.interfaces.scheduler import PromptLogprobs, SchedulerOutput
from enginebay.layers.attention import AttentionRuntime
from enginebay.sampling.pipeline import Sampler
from enginebay.worker.batch import SlotBatch
from enginebay.worker.cpu_replay import DecodeReplays
from enginebay.worker.cuda_graphs import DecodeGraph
from enginebay.worker.prompt_scorer import PromptScorer
from enginebay.worker.step_result import StepResult


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
    sampler
        Draws the tokens.
    vocab_limit
        Ids from here on are never drawn nor scored.
    prompt_logits
        Score prompt tokens by logits instead of log-probabilities.
    """

    def __init__(
        self,
        model: CausalLM,
        batch: SlotBatch,
        runtimes: Sequence[AttentionRuntime],
        max_num_tokens: int,
        *,
        sampler: Sampler,
        vocab_limit: int,
        prompt_logits: bool = False,
    ) -> None:
        self.model = model
        self.batch = batch
        self.runtimes = tuple(runtimes)
        self.sampler = sampler
        self._vocab_limit = vocab_limit
        self._scorer = PromptScorer(batch.max_num_rows, batch.token_ids, self._head, as_logits=prompt_logits)
        rows = batch.max_num_rows
        self._eager_states: tuple[tuple[PlanState, PlanState], ...] = tuple(
            (r.decode.make_state(Bucket(rows, 1)), r.prefill.make_state(Bucket(rows, max_num_tokens)))
            for r in self.runtimes
        )
        self._graphs: dict[int, DecodeGraph] = {}
        self._replays = DecodeReplays(model, self.runtimes) if batch.device.type == "cpu" else None
        #: captured sizes, ascending
        self.graph_sizes: tuple[int, ...] = ()
        self._pending: tuple[SchedulerOutput, Tensor | None, dict[int, PromptLogprobs]] | None = None

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
        if output.new_requests:
            self.sampler.add(output.new_requests)
            self._scorer.add(output.new_requests)
        size = self._graph_size(output)
        prompt: dict[int, PromptLogprobs] = {}
        if size is None:
            batch = self.batch.apply(output)
            self.plan(batch, self._eager_states)
            logits = None if self._replays is None or batch.prefill is not None else self._replays.logits(batch)
            if logits is None:
                hidden = self.model(batch.input_ids, batch.positions)
                # Where every row is amid its prompt, none has logits.
                logits = self._last_logits(batch, hidden) if output.samples.any() else None
                if stretches := self._scorer.stretches(output):
                    prompt = self._scorer.score(stretches, output, hidden)
        else:
            graph = self._graphs[size]
            batch = self.batch.apply(output, padded_rows=size)
            self.plan(batch, graph.states)
            logits = graph.replay()[: output.num_rows]
        self.batch.advance(output)
        self._pending = (output, logits, prompt)

    @torch.inference_mode()
    def sample(self) -> StepResult:
        """Sample the step that `execute` ran last."""
        if self._pending is None:
            raise ExecutorError("sample was called before execute_model")
        (output, logits, prompt), self._pending = self._pending, None
        if logits is None:
            return StepResult(output, None, None, prompt)
        sampled = self.sampler.sample(
            logits[:, : self._vocab_limit],
            self.batch.sampling_rows(output),
            output.slots,
            output.samples,
            lambda: self.batch.sampler_rows(output),
        )
        # A row left without a token ends with this step, but the step in flight behind it still reads its line.
        stored = sampled.token_ids.clamp(min=0) if sampled.may_lack else sampled.token_ids
        self.batch.store_sampled(output, stored)
        return StepResult(output, sampled.token_ids, sampled.logprobs, prompt)

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
        return self._last_logits(batch, self.model(batch.input_ids, batch.positions))

    def _last_logits(self, batch: Batch, hidden: Tensor) -> Tensor:
        if batch.num_tokens != batch.num_rows:
            hidden = hidden[batch.logits_indices]
        return self.model.compute_logits(hidden)

    def _head(self, hidden: Tensor) -> Tensor:
        """Hidden states ``[n, d]`` to logits ``[n, V]`` of the ids that may be drawn."""
        return self.model.compute_logits(hidden)[:, : self._vocab_limit]

    def _graph_size(self, output: SchedulerOutput) -> int | None:
        rows = output.num_rows
        if not self.graph_sizes or output.num_decode_rows != rows or rows > self.graph_sizes[-1]:
            return None
        return next(size for size in self.graph_sizes if size >= rows)
