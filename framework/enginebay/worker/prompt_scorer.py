"""Scores of prompt tokens: the logits at a prompt's positions, against the tokens that follow.

It knows slots, hidden states and the output head; sampling it does not know.

Shapes: ``T`` tokens of a step, ``N`` prompt tokens scored in it, ``d`` model width, ``V`` vocabulary that may be drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from enginebay.interfaces.scheduler import NewRequest, SchedulerOutput
from enginebay.kernels.transfer import to_device
from enginebay.sampling.logprobs import Scores, score
from enginebay.worker.step_result import PromptScores, PromptStretch

#: Positions whose logits are held at once, so that long prompts over large vocabularies fit.
_CHUNK = 256

#: Slots that ask nothing.
_NONE_ASKED = -2


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

    def score(self, stretches: Sequence[PromptStretch], output: SchedulerOutput, hidden: Tensor) -> PromptScores:
        """Score them by the step's hidden states, ``[T, d]``."""
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
        num_top = -1 if any(s.num_top < 0 for s in stretches) else max(s.num_top for s in stretches)
        parts: list[Scores] = []
        for token_chunk, target_chunk in zip(torch.split(token, _CHUNK), torch.split(targets, _CHUNK), strict=True):
            logits = self._head(hidden[token_chunk])
            parts.append(score(logits, target_chunk, num_top, as_logits=self._as_logits))
        return PromptScores(stretches, Scores.join(parts))
