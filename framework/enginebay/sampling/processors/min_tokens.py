"""``min_tokens``: ids that end a request are not drawn before it has so many tokens (C37)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from enginebay.interfaces.sampler import LogitsProcessor, ProcessorContext, SamplerRows
from enginebay.interfaces.scheduler import Int32Array, NewRequest
from enginebay.sampling.processors.entries import SlotEntries, token_array


class MinTokens(LogitsProcessor):
    """Forbids stop ids for the first `min_tokens` tokens of a request."""

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        self._entries = SlotEntries(context.max_num_seqs, context.device)
        self._least = np.zeros(context.max_num_seqs, dtype=np.int32)

    def add(self, requests: Sequence[NewRequest]) -> None:
        """Keep each request's stop ids, if it has a minimum."""
        for request in requests:
            least = request.params.min_tokens
            self._least[request.slot] = least
            stops = token_array(request.stop_token_ids, self.context.vocab_size) if least else None
            self._entries.put(request.slot, None if stops is None else (stops,))

    def applies_to(self, slots: Int32Array) -> bool:
        """Whether one of them has a minimum, be it reached or not."""
        return bool(self._entries.present[slots].any())

    def apply(self, logits: Tensor, rows: SamplerRows) -> None:
        """Set the stop ids of rows below their minimum to -inf."""
        # A token of index i is the i+1st, so the first that may end a request has the index min_tokens. The host knows it.
        flat = self._entries.flat(rows.slots_host, rows.output_index_host < self._least[rows.slots_host])
        if flat is not None:
            # Not an assignment: a Python number would be copied to the device, and waited for.
            logits.index_put_((flat.row_of_entry, flat.columns[0]), logits.new_full((), -torch.inf))
