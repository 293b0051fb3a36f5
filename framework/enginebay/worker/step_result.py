"""What a step leaves on the device, and its way to the host as a `ModelOutput`.

It knows tensors and copies; it does not know how they were made.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from enginebay.interfaces.scheduler import ModelOutput, PromptLogprobs, SchedulerOutput, TokenLogprobs
from enginebay.sampling.pipeline import RowScores


@dataclass(frozen=True, slots=True)
class StepResult:
    """A sampled step."""

    output: SchedulerOutput
    #: int64 ``[R]``, undefined in rows that do not sample; None if none does
    token_ids: Tensor | None
    logprobs: RowScores | None = None
    #: prompt tokens' scores by row, on the host already
    prompt: dict[int, PromptLogprobs] = field(default_factory=dict)

    def map(self, function: Callable[[Tensor], Tensor]) -> StepResult:
        """This with each tensor put through `function`."""
        logprobs = self.logprobs
        return StepResult(
            self.output,
            None if self.token_ids is None else function(self.token_ids),
            None if logprobs is None else RowScores(logprobs.rows, logprobs.scores.map(function)),
            self.prompt,
        )

    def to_host(self) -> ModelOutput:
        """As arrays; the tensors must be on the host."""
        samples = self.output.samples.astype(np.int32)
        if self.token_ids is None:
            token_ids = np.zeros((len(samples), 1), dtype=np.int32)
        else:
            token_ids = self.token_ids.to(torch.int32).unsqueeze(1).numpy()
        return ModelOutput(
            token_ids,
            samples,
            None if self.logprobs is None else _spread(self.logprobs, len(samples)),
            self.prompt,
        )


def _spread(scored: RowScores, num_rows: int) -> TokenLogprobs:
    """The scored rows at their places among all rows; the others hold zeros."""
    found = scored.scores.to_host()
    if len(scored.rows) == num_rows:
        return found
    width = found.token_ids.shape[1]
    spread = TokenLogprobs(
        np.zeros((num_rows, width), np.int32), np.zeros((num_rows, width), np.float32), np.zeros(num_rows, np.int32)
    )
    spread.token_ids[scored.rows] = found.token_ids
    spread.logprobs[scored.rows] = found.logprobs
    spread.ranks[scored.rows] = found.ranks
    return spread


def done(output: ModelOutput) -> Future[ModelOutput]:
    """A future that is complete."""
    future: Future[ModelOutput] = Future()
    future.set_result(output)
    return future


class CopyingFuture(Future[ModelOutput]):
    """Completes when a step's result has arrived on the host; the copy runs beside the next step."""

    def __init__(self, result: StepResult, stream: torch.cuda.Stream) -> None:
        super().__init__()
        stream.wait_stream(torch.cuda.current_stream())

        def copied(tensor: Tensor) -> Tensor:
            host = tensor.to("cpu", non_blocking=True)
            # Its memory must not be used again before the copy has run.
            tensor.record_stream(stream)
            return host

        with torch.cuda.stream(stream):
            self._host = result.map(copied)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(stream)

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def result(self, timeout: float | None = None) -> ModelOutput:
        """Wait for the copies."""
        self._event.synchronize()
        return self._host.to_host()
