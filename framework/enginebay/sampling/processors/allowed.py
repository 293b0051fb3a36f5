"""``allowed_token_ids``: no other token is drawn.

Shapes: ``Q`` rows that ask, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from enginebay.interfaces.sampler import LogitsProcessor, ProcessorContext, SamplerRows
from enginebay.interfaces.scheduler import Int32Array, NewRequest
from enginebay.sampling.processors.entries import FlatEntries, SlotEntries, token_array


class AllowedTokens(LogitsProcessor):
    """Forbids all tokens but a request's own list."""

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        self._entries = SlotEntries(context.max_num_seqs, context.device)
        self._forbidden: tuple[FlatEntries, Tensor] | None = None

    def add(self, requests: Sequence[NewRequest]) -> None:
        """Keep each request's list."""
        for request in requests:
            allowed = request.params.allowed_token_ids
            if allowed is None:
                self._entries.put(request.slot, None)
                continue
            tokens = token_array(allowed, self.context.vocab_size)
            # If all of them only pad the model's vocabulary, nothing may be drawn: the mask has one column more than the
            # vocabulary, so that such a list is not an empty one.
            self._entries.put(request.slot, (np.append(tokens, self.context.vocab_size),))

    def applies_to(self, slots: Int32Array) -> bool:
        """Whether one of them has a list."""
        return bool(self._entries.present[slots].any())

    def apply(self, logits: Tensor, rows: SamplerRows) -> None:
        """Set what is not on a row's list to -inf."""
        flat = self._entries.flat(rows.slots_host)
        if flat is not None:
            logits[flat.rows] = logits[flat.rows].masked_fill_(self._mask(flat), -torch.inf)

    def _mask(self, flat: FlatEntries) -> Tensor:
        """What is forbidden, bool ``[Q, V]``; kept while the rows are the same."""
        if self._forbidden is None or self._forbidden[0] is not flat:
            size = (len(flat.rows), self.context.vocab_size + 1)
            mask = torch.ones(size, dtype=torch.bool, device=self.context.device)
            mask.index_put_((flat.place_of_entry, flat.columns[0]), mask.new_zeros(()))  # see min_tokens
            self._forbidden = (flat, mask[:, :-1])
        return self._forbidden[1]
