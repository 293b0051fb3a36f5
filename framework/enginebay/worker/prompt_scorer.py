"""Scores of prompt tokens: the logits at a prompt's positions, against the tokens that follow.

It knows slots, hidden states and the output head; sampling it does not know.

Shapes: ``T`` tokens of a step, ``N`` prompt tokens scored in it, ``d`` model width, ``V`` vocabulary that may be drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from enginebay.interfaces.scheduler import NewRequest, PromptLogprobs, SchedulerOutput, TokenLogprobs
from enginebay.kernels.transfer import to_device
from enginebay.sampling.logprobs import score

#: Positions whose logits and scores the device holds at once, so that long prompts over large vocabularies fit.
PROMPT_CHUNK = 256

#: Slots that ask nothing.
_NONE_ASKED = -2


@dataclass(frozen=True, slots=True)
class PromptStretch:
    """Consecutive prompt tokens of one row."""

    row: int
    #: index in the prompt of the first
    start: int
    num_tokens: int
    #: likeliest tokens wanted at each; -1 wants all
    num_top: int


class PromptScorer:
    """Finds and scores the prompt tokens that requests ask for.

    Parameters
    ----------
    num_slots
        Slots of requests.
    token_ids
        int32 ``[S, L]``: each slot's prompt and outputs.
    head
        Hidden states ``[n, d]`` to logits ``[n, V]``.
    as_logits
        Return logits instead of log-probabilities.
    """

    def __init__(self, num_slots: int, token_ids: Tensor, head: Callable[[Tensor], Tensor], *, as_logits: bool) -> None:
        self._token_ids = token_ids
        self._head = head
        self._as_logits = as_logits
        self._num_top = np.full(num_slots, _NONE_ASKED, dtype=np.int32)
        self._num_prompt = np.zeros(num_slots, dtype=np.int32)

    def add(self, requests: Sequence[NewRequest]) -> None:
        """Take note of requests that enter the batch."""
        for request in requests:
            wanted = request.params.prompt_logprobs
            self._num_top[request.slot] = _NONE_ASKED if wanted is None else wanted
            self._num_prompt[request.slot] = request.num_prompt_tokens

    def stretches(self, output: SchedulerOutput) -> list[PromptStretch]:
        """What the step can score: the tokens after those that it computes, as far as the prompt goes."""
        slots = output.slots
        asked = self._num_top[slots] != _NONE_ASKED
        if not asked.any():
            return []
        start = output.num_computed_tokens + 1
        count = np.minimum(output.num_scheduled_tokens, self._num_prompt[slots] - start)
        return [
            PromptStretch(row, int(start[row]), int(count[row]), int(self._num_top[slots[row]]))
            for row in np.flatnonzero(asked & (count > 0)).tolist()
        ]

    def score(
        self, stretches: Sequence[PromptStretch], output: SchedulerOutput, hidden: Tensor
    ) -> dict[int, PromptLogprobs]:
        """Score them by the step's hidden states, ``[T, d]``; by row, on the host, each as wide as it asks.

        Waits for the device: only what has left it makes room for the next chunk.
        """
        first = np.cumsum(output.num_scheduled_tokens) - output.num_scheduled_tokens
        where = np.concatenate(
            [
                np.stack(
                    [
                        first[s.row] + np.arange(s.num_tokens),
                        np.full(s.num_tokens, output.slots[s.row]),
                        s.start + np.arange(s.num_tokens),
                    ]
                )
                for s in stretches
            ],
            axis=1,
        ).astype(np.int64)
        token, slot, position = to_device(where, hidden.device)
        targets = self._token_ids[slot, position].long()
        parts: list[list[TokenLogprobs]] = [[] for _ in stretches]
        for first_token in range(0, len(token), PROMPT_CHUNK):
            chunk = slice(first_token, first_token + PROMPT_CHUNK)
            pieces = _pieces(stretches, chunk)
            wanted = [stretches[index].num_top for index, _ in pieces]
            num_top = -1 if min(wanted) < 0 else max(wanted)
            scores = score(self._head(hidden[token[chunk]]), targets[chunk], num_top, as_logits=self._as_logits)
            found = scores.map(Tensor.cpu).to_host()
            for index, here in pieces:
                parts[index].append(_cut(found, here, stretches[index].num_top))
        return {s.row: PromptLogprobs(s.start, _joined(part)) for s, part in zip(stretches, parts, strict=True)}


def _pieces(stretches: Sequence[PromptStretch], chunk: slice) -> list[tuple[int, slice]]:
    """The stretches that have tokens in `chunk` of all, by their index, and where these lie in the chunk."""
    pieces, end = [], 0
    for index, stretch in enumerate(stretches):
        start, end = end, end + stretch.num_tokens
        here = slice(max(start, chunk.start) - chunk.start, min(end, chunk.stop) - chunk.start)
        if here.start < here.stop:
            pieces.append((index, here))
    return pieces


def _cut(scores: TokenLogprobs, here: slice, num_top: int) -> TokenLogprobs:
    """A copy of some positions, so that a narrow row does not keep a wide neighbour's chunk alive."""
    width = None if num_top < 0 else 1 + num_top
    return TokenLogprobs(
        scores.token_ids[here, :width].copy(), scores.logprobs[here, :width].copy(), scores.ranks[here].copy()
    )


def _joined(parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
    if len(parts) == 1:
        return parts[0]
    return TokenLogprobs(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.ranks for part in parts]),
    )
