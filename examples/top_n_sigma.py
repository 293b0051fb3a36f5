"""A logits processor in one file: only tokens within n standard deviations of the likeliest one are drawn (top-n-sigma).

    enginebay conformance run sampler:top_n_sigma --local examples/top_n_sigma.py

A request asks with ``extra_args={"top_n_sigma": {"n": 1.0}}``. The rule is that of Tang et al., "Top-nσ: Not All Logits Are
You Need" (2024). Dividing logits by a temperature divides their deviation too, so that the same tokens remain at every
temperature. The likeliest token always remains: the processor is `argmax_invariant`, and greedy rows skip it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from enginebay import hookimpl
from enginebay.plugins.records import LogitsProcessorRecord
from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from enginebay.interfaces.sampler import LogitsProcessor, ProcessorContext

NAME = "top_n_sigma"


class Words(BaseModel):
    """What a request may say in ``extra_args={"top_n_sigma": {...}}``."""

    model_config = ConfigDict(extra="forbid")

    n: float = Field(ge=0, le=100, allow_inf_nan=False, examples=[1.0, 0.3, 2.5])
    """Standard deviations; 0 leaves the likeliest token alone."""


def make(context: ProcessorContext) -> LogitsProcessor:
    """Build the processor."""
    import numpy as np
    import torch
    from enginebay.interfaces.sampler import LogitsProcessor, SamplerRows
    from enginebay.interfaces.scheduler import Int32Array, NewRequest
    from enginebay.kernels.transfer import to_device
    from torch import Tensor

    class TopNSigma(LogitsProcessor):
        """Forbids what is far below the likeliest token."""

        def __init__(self, context: ProcessorContext) -> None:
            super().__init__(context)
            #: by slot; NaN: did not ask
            self._n = np.full(context.max_num_seqs, np.nan, dtype=np.float32)

        def add(self, requests: Sequence[NewRequest]) -> None:
            """Keep each request's n."""
            for request in requests:
                told = request.params.extra_args.get(NAME)
                self._n[request.slot] = told["n"] if told else np.nan

        def applies_to(self, slots: Int32Array) -> bool:
            """Whether one of them asked."""
            return not bool(np.isnan(self._n[slots]).all())

        def apply(self, logits: Tensor, rows: SamplerRows) -> None:
            """Forbid, in the rows that asked; what is forbidden already does not count."""
            wanted = self._n[rows.slots_host]
            some = np.flatnonzero(~np.isnan(wanted))
            index, n = to_device(some, logits.device), to_device(wanted[some], logits.device).double().unsqueeze(1)
            part = logits[index]
            allowed = part > -torch.inf
            # below the likeliest; in float64, which holds the squares of all float32
            below = torch.where(allowed, part.amax(1, keepdim=True).double() - part.double(), 0.0)
            count = allowed.sum(1, keepdim=True).clamp(min=1)
            mean = below.sum(1, keepdim=True) / count
            deviation = (torch.where(allowed, below - mean, 0.0).square().sum(1, keepdim=True) / count).sqrt()
            logits[index] = part.masked_fill(below > n * deviation, -torch.inf)

    return TopNSigma(context)


@hookimpl
def enginebay_logits_processors() -> Iterable[LogitsProcessorRecord]:
    """The one processor."""
    return [
        LogitsProcessorRecord(
            name=NAME,
            summary="draws tokens within n standard deviations of the likeliest one",
            factory=make,
            api_version=0,
            stage="scaled",
            argmax_invariant=True,
            request_options=Words,
        )
    ]
