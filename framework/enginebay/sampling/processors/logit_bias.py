"""``logit_bias``: numbers added to the logits of single tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from enginebay.interfaces.sampler import LogitsProcessor, ProcessorContext, SamplerRows
from enginebay.interfaces.scheduler import Int32Array, NewRequest
from enginebay.sampling.processors.entries import SlotEntries


class LogitBias(LogitsProcessor):
    """Adds a request's biases."""

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        self._entries = SlotEntries(context.max_num_seqs, context.device)

    def add(self, requests: Sequence[NewRequest]) -> None:
        """Keep each request's biases."""
        for request in requests:
            bias = {t: b for t, b in request.params.logit_bias.items() if t < self.context.vocab_size}
            columns = (np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float32))
            self._entries.put(request.slot, columns)

    def applies_to(self, slots: Int32Array) -> bool:
        """Whether one of them has biases."""
        return bool(self._entries.present[slots].any())

    def apply(self, logits: Tensor, rows: SamplerRows) -> None:
        """Add them; a forbidden token stays forbidden."""
        flat = self._entries.flat(rows.slots_host)
        if flat is not None:
            tokens, bias = flat.columns
            logits[flat.row_of_entry, tokens] += bias
