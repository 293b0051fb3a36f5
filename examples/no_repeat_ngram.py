"""A logits processor in one file: no run of n tokens occurs twice in a request's text.

    from enginebay import LLM, SamplingParams

    llm = LLM("smollm2-135m-instruct", plugins=["examples/no_repeat_ngram.py"], sampler={"processors": ["no_repeat_ngram"]})
    llm.generate("Sing:", SamplingParams(temperature=0, max_tokens=64, extra_args={"no_repeat_ngram": {"n": 3}}))

See that it keeps the contract:

    enginebay conformance run sampler:no_repeat_ngram --local examples/no_repeat_ngram.py

A token is forbidden while it would complete a run of ``n`` tokens that the text holds already. Everything is read from the
device's lines of tokens, so that two steps in flight and preemption cannot make it wrong; nothing waits for the device.

Shapes: ``Q`` rows that ask for one n, ``M`` tokens of the longest row, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from enginebay import hookimpl
from enginebay.plugins.records import LogitsProcessorRecord
from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from enginebay.interfaces.sampler import LogitsProcessor, ProcessorContext

NAME = "no_repeat_ngram"


class Words(BaseModel):
    """What a request may say in ``extra_args={"no_repeat_ngram": {...}}``."""

    model_config = ConfigDict(extra="forbid")

    n: int = Field(ge=2, le=64, examples=[2, 3, 5])
    """Tokens of a run."""
    prompt_too: bool = True
    """Whether runs of the prompt count; if not, the output may quote it."""


def make(context: ProcessorContext) -> LogitsProcessor:
    """Build the processor."""
    import numpy as np
    import torch
    from enginebay.interfaces.sampler import LogitsProcessor, SamplerRows
    from enginebay.interfaces.scheduler import Int32Array, NewRequest
    from enginebay.kernels.transfer import to_device
    from torch import Tensor

    class NoRepeatNgram(LogitsProcessor):
        """Forbids what would repeat a run."""

        def __init__(self, context: ProcessorContext) -> None:
            super().__init__(context)
            #: by slot; 0: did not ask
            self._n = np.zeros(context.max_num_seqs, dtype=np.int32)
            self._prompt_too = np.zeros(context.max_num_seqs, dtype=np.bool_)

        def add(self, requests: Sequence[NewRequest]) -> None:
            """Keep each request's n."""
            for request in requests:
                told = request.params.extra_args.get(NAME)
                self._n[request.slot] = told["n"] if told else 0
                self._prompt_too[request.slot] = bool(told and told["prompt_too"])

        def applies_to(self, slots: Int32Array) -> bool:
            """Whether one of them asked."""
            return bool(self._n[slots].any())

        def apply(self, logits: Tensor, rows: SamplerRows) -> None:
            """Forbid, for the rows of each n together."""
            asked = self._n[rows.slots_host]
            for n in np.unique(asked[asked > 0]).tolist():
                if rows.max_num_tokens < n:
                    continue
                some = np.flatnonzero(asked == n)
                index = to_device(some, logits.device)
                prompt_too = to_device(self._prompt_too[rows.slots_host[some]], logits.device)
                hits, last = self._runs(rows, index, prompt_too, n)
                forbidden = torch.zeros(len(some), self.context.vocab_size + 1, dtype=torch.bool, device=logits.device)
                # what is no hit, or has no logit, lands in a column that is cut off
                within = hits & (last < self.context.vocab_size)
                forbidden.scatter_(1, torch.where(within, last, self.context.vocab_size), True)
                logits[index] = logits[index].masked_fill(forbidden[:, :-1], -torch.inf)

        def _runs(self, rows: SamplerRows, index: Tensor, prompt_too: Tensor, n: int) -> tuple[Tensor, Tensor]:
            """Which runs begin as a row ends, bool ``[Q, M - n + 1]``, and each run's last token, int64 of that shape."""
            tokens = rows.token_ids[rows.slots[index], : rows.max_num_tokens].long()
            count = rows.num_tokens[index].unsqueeze(1)
            newest = (count + torch.arange(1 - n, 0, device=tokens.device)).clamp_(min=0)
            runs = tokens.unfold(1, n, 1)
            equal = (runs[..., :-1] == tokens.gather(1, newest).unsqueeze(1)).all(-1)
            start = torch.arange(runs.shape[1], device=tokens.device)
            first = torch.where(prompt_too, 0, rows.num_prompt_tokens[index]).unsqueeze(1)
            return equal & (start >= first) & (start + n <= count), runs[..., -1]

    return NoRepeatNgram(context)


@hookimpl
def enginebay_logits_processors() -> Iterable[LogitsProcessorRecord]:
    """The one processor."""
    return [
        LogitsProcessorRecord(
            name=NAME,
            summary="no run of n tokens occurs twice in a request's text",
            factory=make,
            api_version=0,
            request_options=Words,
        )
    ]
