"""``bad_words``: token sequences that the output never holds.

The last token of a sequence is forbidden while its other tokens are the newest ones of the output, as in vLLM. The prompt
does not count: a sequence that would begin in it may be completed.

Shapes: ``E`` sequences of the rows, ``k`` tokens of the longest one but the last.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from enginebay.interfaces.sampler import LogitsProcessor, ProcessorContext, SamplerRows
from enginebay.interfaces.scheduler import Int32Array, NewRequest
from enginebay.sampling.processors.entries import NO_TOKEN, Column, SlotEntries


class BadWords(LogitsProcessor):
    """Forbids the token that would complete a sequence."""

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        self._entries = SlotEntries(context.max_num_seqs, context.device)

    def add(self, requests: Sequence[NewRequest]) -> None:
        """Keep each request's sequences."""
        for request in requests:
            words = [word for word in request.bad_words if word and word[-1] < self.context.vocab_size]
            self._entries.put(request.slot, _columns(words) if words else None)

    def applies_to(self, slots: Int32Array) -> bool:
        """Whether one of them has bad words."""
        return bool(self._entries.present[slots].any())

    def apply(self, logits: Tensor, rows: SamplerRows) -> None:
        """Set the last tokens of sequences that stand before their completion to -inf."""
        flat = self._entries.flat(rows.slots_host)
        if flat is None:
            return
        row = flat.row_of_entry
        last, length, before = flat.columns
        width = before.shape[1]
        place = rows.num_tokens[row].unsqueeze(1) + torch.arange(-width, 0, device=logits.device)
        newest = rows.token_ids[rows.slots[row].unsqueeze(1), place.clamp_(min=0)]
        stands = ((newest == before) | (before == NO_TOKEN)).all(dim=1) & (rows.output_index[row] >= length)
        # Several sequences may end in one token, so the verdicts are summed, not assigned.
        logits.index_put_((row, last), torch.where(stands, -torch.inf, 0.0), accumulate=True)


def _columns(words: list[tuple[int, ...]]) -> tuple[Column, ...]:
    """Last token int64 ``[e]``, number of those before int64 ``[e]``, and they, int32 ``[e, k]`` aligned right."""
    lengths = [len(word) - 1 for word in words]
    before = np.full((len(words), max(lengths)), NO_TOKEN, dtype=np.int32)
    for line, word in zip(before, words, strict=True):
        if len(word) > 1:
            line[1 - len(word) :] = word[:-1]
    return np.array([word[-1] for word in words], dtype=np.int64), np.array(lengths, dtype=np.int64), before
