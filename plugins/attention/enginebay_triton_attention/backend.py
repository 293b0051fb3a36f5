"""The backend: plans decode on the device, and launches the kernels of the phase.

Nothing is read on the host but counts that the core knows anyway. All states share the plan's buffers, because every
step is planned before it runs and steps run in order on one stream.

Shapes: ``R`` rows, ``H`` query heads, ``K`` KV heads, ``D`` head size.
"""

from __future__ import annotations

import torch
import triton
from enginebay.interfaces.attention import (
    AttentionBackend,
    AttentionContext,
    AttentionLayer,
    PlanState,
    require_single_token_decode,
    require_whole_heads,
)
from enginebay.interfaces.batch import Bucket, PhaseBatch
from torch import Tensor

from enginebay_triton_attention.decode import Partials, decode_attention, decode_config
from enginebay_triton_attention.prefill import prefill_attention
from enginebay_triton_attention.split_plan import SplitPlan, max_items, plan_splits

#: multiprocessors assumed where there is no GPU, under Triton's interpreter
_INTERPRETED_SMS = 8


class TritonAttention(AttentionBackend):
    """Paged attention of one plan group in one phase by our own kernels."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        spec, rows = context.spec, context.max_num_rows
        self._rows_padded = triton.next_power_of_2(rows)
        self._config = decode_config(spec.head_dim)
        self._wanted = max(1, self._config.programs_per_sm * _multiprocessors(context.device) // spec.num_kv_heads)
        #: of the decode phase
        self._split: tuple[SplitPlan, Partials] | None = None
        if context.phase == "decode":
            items = max_items(rows, self._wanted)
            self._split = (
                SplitPlan.empty(rows, self._wanted, context.device),
                Partials.empty(items, spec.num_heads, spec.head_dim, context.device),
            )

    def make_state(self, bucket: Bucket) -> PlanState:
        """States hold nothing; only decode steps can be captured, whose launches do not depend on lengths."""
        require_single_token_decode("triton", self.context.phase, bucket)
        return PlanState(bucket)

    def workspace_bytes(self, bucket: Bucket) -> int:
        """The plan and the partial results of split rows; the same for every bucket."""
        return 0 if self._split is None else sum(buffers.nbytes for buffers in self._split)

    def plan(self, batch: PhaseBatch, state: PlanState) -> None:
        """Split a decode step's rows, on the device."""
        if self._split is not None:
            plan_splits(
                batch.seq_lens,
                self._split[0],
                wanted=self._wanted,
                window=self.context.spec.window,
                tile=self._config.block_keys,
                min_split=self._config.min_split,
            )

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        cache: Tensor,
        batch: PhaseBatch,
        state: PlanState,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        """Attention of one layer; see the interface."""
        require_whole_heads("triton", cache)
        table = batch.groups[self.context.group].block_table
        if self._split is None:
            prefill_attention(layer, query, cache, batch, table, out, lse, rows_padded=self._rows_padded)
            return
        decode_attention(
            layer,
            query,
            cache,
            table,
            *self._split,
            out,
            lse,
            items=max_items(batch.num_rows, self._wanted),
            config=self._config,
        )


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
