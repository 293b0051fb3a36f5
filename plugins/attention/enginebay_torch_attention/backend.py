"""The backend: turns a step into groups of rows once, then runs each layer over them.

`plan` does what all layers share: grouping on the host, indices and masks on the device. `attend` gathers and
multiplies. It knows nothing of schedulers, models or who wrote the cache.

Shapes: ``R`` rows, ``S`` keys a row (padded), ``K`` KV heads, as in `paging` and `scores`.
"""

from __future__ import annotations

import numpy as np
import torch
from enginebay.errors import PluginError
from enginebay.interfaces.attention import (
    AttentionBackend,
    AttentionContext,
    AttentionLayer,
    PlanState,
    require_whole_heads,
)
from enginebay.interfaces.batch import Bucket, PhaseBatch
from enginebay.kernels.cpu.ops import decode_attention, decodes
from enginebay.kernels.cpu.prefill import prefill_attention, prefills
from torch import Tensor

from enginebay_torch_attention.grouping import RowGroup, fixed_groups, group_rows
from enginebay_torch_attention.limits import limits_for
from enginebay_torch_attention.paging import Pager, Prepared, layout_strides
from enginebay_torch_attention.scores import RowAttention


class TorchPlanState(PlanState):
    """The step's groups, and for each its indices and masks, or None where a layer recomputes them."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        self.groups: list[RowGroup] = []
        self.prepared: list[Prepared | None] = []


class TorchAttention(AttentionBackend):
    """Paged attention in plain PyTorch."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        spec = context.spec
        self.limits = limits_for(context.device.type)
        self._rows = RowAttention(context, self.limits)
        self._pager = Pager(context.group, context.block_size, spec.num_kv_heads, spec.window)
        #: what `plan` indexes for; corrected by `attend` if the cache it is given has others
        self._strides = layout_strides(context.layout, context.block_size, spec.num_kv_heads, spec.head_dim)

        device, dtype, decode = context.device.type, context.dtype, context.phase == "decode"
        #: on CPU a compiled kernel reads the paged cache as it stands: no plan, no gathered copy
        self._reads_cache_in_place = dtype == context.kv_dtype and (
            decodes(device, dtype) if decode else prefills(device, dtype, spec.head_dim)
        )
        # sinks are torch operations behind the kernel
        self.replayable = decode and self._reads_cache_in_place and not spec.sinks

    def make_state(self, bucket: Bucket) -> TorchPlanState:
        """A captured bucket's groups and buffers are fixed here, for max_model_len keys a row."""
        state = TorchPlanState(bucket)
        if bucket.captured:
            if bucket.query_len != 1:
                raise PluginError(
                    f"attention backend 'torch' captures decode steps of one token a row, not {bucket.query_len}; "
                    "run longer steps eagerly"
                )
            state.groups = fixed_groups(bucket.rows, self._max_keys(1), self._max_group_keys)
        return state

    def plan(self, batch: PhaseBatch, state: PlanState) -> None:
        """Group the rows and prepare as many groups as the limits keep; nothing here waits for the device."""
        assert isinstance(state, TorchPlanState)
        if self._reads_cache_in_place:
            return
        self._rows.scratch.new_step()
        if state.bucket.captured and state.prepared:
            for rows, kept in zip(state.groups, state.prepared, strict=True):
                if kept is not None:
                    kept.copy_(self._prepare(batch, rows))
            return
        if not state.bucket.captured:
            state.groups = self._group(batch)
        state.prepared = []
        left = self.limits.plan_bytes
        for rows in state.groups:
            left -= self._prepared_bytes(rows)
            state.prepared.append(self._prepare(batch, rows).keep() if left >= 0 else None)

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
        assert isinstance(state, TorchPlanState)
        require_whole_heads("torch", cache)
        result = out
        if layer.sinks is not None:
            if lse is None:
                lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
            if not self._reads_cache_in_place:
                result = torch.empty(query.shape, dtype=torch.float32, device=query.device)  # rounded once, at the end
        if self._reads_cache_in_place:
            self._read_in_place(query, cache, batch, result, lse)
        else:
            self._read_gathered(layer, query, cache, batch, state, result, lse)
        if layer.sinks is not None:
            assert lse is not None
            # A term more in the denominator scales what was divided by it without.
            torch.mul(result, torch.sigmoid(lse - layer.sinks).unsqueeze(-1), out=out)
            torch.logaddexp(lse, layer.sinks, out=lse)

    def _read_gathered(
        self,
        layer: AttentionLayer,
        query: Tensor,
        cache: Tensor,
        batch: PhaseBatch,
        state: TorchPlanState,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Torch over a gathered copy."""
        if cache.stride() != self._strides:
            self._restride(cache, batch, state)
        for rows, kept in zip(state.groups, state.prepared, strict=True):
            prepared = self._prepare(batch, rows) if kept is None else kept
            if lse is not None and self._rows.uses_sdpa(rows):
                prepared = self._prepare(batch, rows, masked=True)
            self._rows.run(rows, prepared, query, cache, out, lse, (layer.k_scale, layer.v_scale))

    def _read_in_place(self, query: Tensor, cache: Tensor, batch: PhaseBatch, out: Tensor, lse: Tensor | None) -> None:
        """The compiled kernel of the phase."""
        spec, table, lens = self.context.spec, batch.groups[self.context.group].block_table, batch.seq_lens
        if self.context.phase == "decode":
            decode_attention(
                query, cache, table, lens, out, scale=spec.scale, window=spec.window, soft_cap=spec.soft_cap, lse=lse
            )
            return
        prefill_attention(
            query,
            cache,
            table,
            batch.query_start_loc,
            lens,
            out,
            scale=spec.scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
            lse=lse,
        )

    def workspace_bytes(self, bucket: Bucket) -> int:
        """An upper bound: kept plans, one group's gathered keys and one block of scores, with their temporaries."""
        spec, limits, run = self.context.spec, self.limits, self._rows
        keys = self._max_keys(bucket.query_len)
        group_keys = min(bucket.rows * keys, max(self._max_group_keys, keys))
        tokens = min(bucket.rows * bucket.query_len, self.context.max_num_tokens)
        # group_rows' padding: a factor, a share of each row, and the slack
        padded_tokens = min(bucket.rows * bucket.query_len, 3 * tokens // 2 + 4 * bucket.rows + limits.slack)
        query_keys = min(bucket.query_len * group_keys, max(limits.score_bytes // run.bytes_per_score, group_keys))
        row_bytes = spec.num_heads * spec.head_dim * 4
        # every query sees a key, so a block holds no more queries than products
        queries = min(padded_tokens, query_keys)
        kept = 2 * min(limits.plan_bytes, self._plan_bytes(bucket.rows, bucket.query_len, keys))  # old and new
        preparing = group_keys * (48 + 24 * spec.num_kv_heads)
        scratch = (
            group_keys * run.bytes_per_key
            + query_keys * (run.bytes_per_score + 16)
            + padded_tokens * (row_bytes * 2 + 64)
            + queries * row_bytes * 2
        )
        unrounded = tokens * row_bytes if spec.sinks else 0
        return kept + preparing + 5 * scratch // 4 + unrounded  # buffers grow by a quarter

    @property
    def _max_group_keys(self) -> int:
        return max(1, self.limits.kv_bytes // self._rows.bytes_per_key)

    def _max_keys(self, query_len: int) -> int:
        """Most keys that a row of `query_len` queries sees."""
        window, most = self.context.spec.window, self.context.max_model_len
        return most if window is None else min(most, window - 1 + query_len)

    def _group(self, batch: PhaseBatch) -> list[RowGroup]:
        query_lens = np.diff(batch.query_start_loc_host[: batch.num_rows + 1]).astype(np.int64)
        key_lens = np.minimum(batch.seq_lens_host[: batch.num_rows], batch.max_seq_len).astype(np.int64)
        if self.context.spec.window is not None:
            key_lens = np.minimum(key_lens, query_lens + (self.context.spec.window - 1))
        return group_rows(
            query_lens,
            key_lens,
            max_keys=self._max_group_keys,
            slack=self.limits.slack,
            split_uncached=self._rows.fused,
            device=self.context.device,
        )

    def _prepare(self, batch: PhaseBatch, rows: RowGroup, *, masked: bool = False) -> Prepared:
        blocks = 0 if self._rows.uses_sdpa(rows) and not masked else self._rows.query_block(rows)
        return self._pager.prepare(batch, rows, self._strides, blocks)

    def _prepared_bytes(self, rows: RowGroup) -> int:
        return self._plan_bytes(rows.num_rows, rows.query_len, rows.key_len)

    def _plan_bytes(self, num_rows: int, query_len: int, key_len: int) -> int:
        """Bytes of index and masks."""
        return 4 * num_rows * key_len * (2 * self.context.spec.num_kv_heads + query_len)

    def _restride(self, cache: Tensor, batch: PhaseBatch, state: TorchPlanState) -> None:
        """Adopt the strides of the cache at hand, e.g. of padded blocks, and index the running step anew.

        In a graph being captured this is captured with the layer, so that a replay indexes anew too.
        """
        self._strides = cache.stride()
        for rows, kept in zip(state.groups, state.prepared, strict=True):
            if kept is not None:
                kept.copy_(self._prepare(batch, rows))
