"""Penalties on tokens that a request holds already: repetition, frequency and presence, by vLLM's formulas, in this order.

* repetition ``p``, over prompt and output: ``l / p`` where ``l > 0``, else ``l * p`` (Keskar et al., "CTRL", 2019).
* frequency ``f``: ``l - f * n``, where the output holds the token ``n`` times.
* presence ``q``: ``l - q`` where ``n > 0``.

Shapes: ``Q`` rows that ask, ``M`` tokens of the longest row, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from enginebay.interfaces.sampler import LogitsProcessor, ProcessorContext, SamplerRows
from enginebay.interfaces.scheduler import Int32Array, NewRequest
from enginebay.sampling.processors.entries import SlotEntries


class Penalties(LogitsProcessor):
    """Lowers the logits of tokens that occurred."""

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        self._entries = SlotEntries(context.max_num_seqs, context.device)

    def add(self, requests: Sequence[NewRequest]) -> None:
        """Keep each request's three numbers, if one of them does anything: an entry a request."""
        for request in requests:
            p = request.params
            given = (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
            columns = tuple(np.array([value], dtype=np.float32) for value in given)
            self._entries.put(request.slot, None if given == (1.0, 0.0, 0.0) else columns)

    def applies_to(self, slots: Int32Array) -> bool:
        """Whether one of them has a penalty."""
        return bool(self._entries.present[slots].any())

    def apply(self, logits: Tensor, rows: SamplerRows) -> None:
        """Lower what occurred."""
        flat = self._entries.flat(rows.slots_host)
        if flat is None:
            return
        repetition, frequency, presence = (column.unsqueeze(1) for column in flat.columns)
        seen, count = self._occurrences(rows, flat.rows)
        part = logits[flat.rows]
        forbidden = part == -torch.inf
        part = torch.where(seen, torch.where(part > 0, part / repetition, part * repetition), part)
        part -= frequency * count
        part -= presence * (count > 0)
        # A tiny or a huge repetition penalty overflows: +inf would make NaN of the row's softmax, -inf forbid the token.
        most = torch.finfo(part.dtype).max
        part.clamp_(min=-most, max=most).masked_fill_(forbidden, -torch.inf)
        logits[flat.rows] = part

    def _occurrences(self, rows: SamplerRows, asked: Tensor) -> tuple[Tensor, Tensor]:
        """What prompt or output hold, bool ``[Q, V]``, and how often the output does, float32 ``[Q, V]``."""
        vocab = self.context.vocab_size
        tokens = rows.token_ids[rows.slots[asked], : rows.max_num_tokens].long()
        place = torch.arange(tokens.shape[1], device=tokens.device)
        within = place < rows.num_tokens[asked].unsqueeze(1)
        # A line goes on with what an earlier request left there; and a prompt may hold ids that only pad the vocabulary.
        tokens = torch.where(within & (tokens < vocab), tokens, vocab)
        in_output = within & (place >= rows.num_prompt_tokens[asked].unsqueeze(1))
        seen = torch.zeros(len(asked), vocab + 1, dtype=torch.bool, device=tokens.device)
        seen.scatter_(1, tokens, True)
        # Sums of ones are exact in float32, in any order, so that no neighbour can change them.
        count = torch.zeros(len(asked), vocab + 1, device=tokens.device)
        count.scatter_add_(1, tokens, in_output.float())
        return seen[:, :vocab], count[:, :vocab]
