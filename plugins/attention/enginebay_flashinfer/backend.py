"""The backend: one FlashInfer wrapper pair a bucket, planned on the host once a step and run once a layer.

All states of a backend share its device buffers, because every step is planned before it runs and steps run in order on
one stream. What cannot be shared is the pinned memory that a plan is copied from: while one step's copy waits in the
stream, the next plan is already being written. So a state has two wrappers, used in turn, each fenced by an event.

The backend knows FlashInfer's public interface only, and nothing of who wrote the cache.

Shapes: ``R`` rows, ``T`` tokens, ``H`` query heads, ``K`` KV heads, ``D`` head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from enginebay.errors import PluginError
from enginebay.interfaces.attention import (
    AttentionBackend,
    AttentionContext,
    AttentionLayer,
    PlanState,
    require_layout,
    require_single_token_decode,
)
from enginebay.interfaces.batch import Bucket, PhaseBatch
from enginebay.plugins.records import HND, NHD
from torch import Tensor

from enginebay_flashinfer import FlashInferOptions
from enginebay_flashinfer.paging import HostPlan, gather_blocks

#: steps whose plans may be on their way to the device at once: one runs, one is prepared
STEPS_IN_FLIGHT = 2
#: device bytes for a plan's indices: a few integers a row when decoding, some more a query tile in prefill
_INT_WORKSPACE_BYTES = {"decode": 2**20, "prefill": 8 * 2**20}
#: what a wrapper allocates when constructed, before it is given the shared buffers
_WRAPPER_BYTES = 9 * 2**20
_LN_2 = math.log(2.0)


@dataclass(slots=True)
class Turn:
    """A wrapper with its own pinned memory, and the event after which that memory may be written again."""

    wrapper: Any
    copied: torch.cuda.Event


class FlashInferState(PlanState):
    """A bucket's turns; the first of them is the one planned last."""

    def __init__(self, bucket: Bucket, turns: list[Turn]) -> None:
        super().__init__(bucket)
        self.turns = turns

    def next_turn(self) -> Turn:
        """The turn not used for longest, once its last plan has reached the device."""
        self.turns.insert(0, self.turns.pop())
        self.turns[0].copied.synchronize()
        return self.turns[0]


class FlashInferAttention(AttentionBackend):
    """Paged attention of one plan group in one phase through FlashInfer."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        require_layout("flashinfer", context.layout, (NHD, HND))
        assert isinstance(context.options, FlashInferOptions)
        self._options = context.options
        self._is_hnd = context.layout.axes == HND.axes
        device, rows = context.device, context.max_num_rows
        self._float_workspace = torch.zeros(self._options.workspace_bytes, dtype=torch.uint8, device=device)
        self._int_workspace = torch.zeros(_INT_WORKSPACE_BYTES[context.phase], dtype=torch.uint8, device=device)
        self._indptr = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self._last_page_len = torch.ones(rows, dtype=torch.int32, device=device)
        self._indices = torch.zeros(rows * context.max_blocks_per_row, dtype=torch.int32, device=device)
        self._positions = torch.arange(len(self._indices), dtype=torch.int32, device=device)

    def make_state(self, bucket: Bucket) -> FlashInferState:
        """Two wrappers; a captured bucket's are fixed to its rows."""
        require_single_token_decode("flashinfer", self.context.phase, bucket)
        return FlashInferState(
            bucket,
            [
                Turn(self._make_wrapper(bucket), torch.cuda.Event())  # type: ignore[no-untyped-call]
                for _ in range(STEPS_IN_FLIGHT)
            ],
        )

    def workspace_bytes(self, bucket: Bucket) -> int:
        """The shared buffers, and what wrappers keep or briefly take; the same for every bucket."""
        own = (self._float_workspace, self._int_workspace, self._indptr, self._last_page_len, self._indices)
        gathered = len(self._indices) * (8 + 4 + 8 + 4)  # gather_blocks' temporaries
        return sum(t.nbytes for t in own) + self._positions.nbytes + gathered + STEPS_IN_FLIGHT * _WRAPPER_BYTES

    def plan(self, batch: PhaseBatch, state: PlanState) -> None:
        """Count blocks on the host, gather their ids on the device, and let FlashInfer split the work."""
        assert isinstance(state, FlashInferState)
        context, rows = self.context, batch.num_rows
        host = HostPlan.of(
            batch.seq_lens_host[:rows],
            batch.query_start_loc_host[: rows + 1],
            context.block_size,
            pin=context.device.type == "cuda",
        )
        indptr, indices = self._indptr[: rows + 1], self._indices[: host.num_blocks]
        indptr.copy_(host.indptr, non_blocking=True)
        table = batch.groups[context.group].block_table[:rows]
        gather_blocks(table, indptr, self._positions[: host.num_blocks], indices)
        turn = state.next_turn()
        self._plan(turn.wrapper, host, indices)
        turn.copied.record()

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
        assert isinstance(state, FlashInferState)
        wrapper = state.turns[0].wrapper
        scale = {} if layer.k_scale == 1.0 else {"k_scale": layer.k_scale}
        if self._is_hnd:
            cache = cache.transpose(2, 3)
        # The kernels take the query's strides from the tensor but write results densely.
        dense = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        if lse is None:
            wrapper.run(query, cache, out=dense, **scale)
        else:
            dense_lse = torch.empty(lse.shape, dtype=torch.float32, device=lse.device)
            wrapper.run(query, cache, out=dense, lse=dense_lse, return_lse=True, **scale)
            torch.mul(dense_lse, _LN_2, out=lse)  # FlashInfer's is of base 2
        if layer.v_scale != 1.0:
            dense.mul_(layer.v_scale)
        if dense is not out:
            out.copy_(dense)

    # --- FlashInfer ------------------------------------------------------------------------------------------------

    def _make_wrapper(self, bucket: Bucket) -> Any:
        """A wrapper over the shared buffers."""
        import flashinfer

        layout = "HND" if self._is_hnd else "NHD"
        if self.context.phase == "prefill":
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                self._float_workspace, layout, backend=self._prefill_kernel()
            )
        else:
            fixed: dict[str, Any] = {}
            if bucket.captured:
                fixed = {
                    "use_cuda_graph": True,
                    "paged_kv_indptr_buffer": self._indptr[: bucket.rows + 1],
                    "paged_kv_indices_buffer": self._indices[: bucket.rows * self.context.max_blocks_per_row],
                    "paged_kv_last_page_len_buffer": self._last_page_len[: bucket.rows],
                }
            # fa2, named: "auto" may take other libraries' kernels, and fa3 is five times slower on single queries.
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._float_workspace, layout, use_tensor_cores=True, backend="fa2", **fixed
            )
        wrapper.reset_workspace_buffer(self._float_workspace, self._int_workspace)
        return wrapper

    def _prefill_kernel(self) -> str:
        """FlashInfer's name of the prefill kernel; its own "auto" also decides by query length, on Hopper alone."""
        is_hopper = torch.cuda.get_device_capability(self.context.device) == (9, 0)
        is_fp8 = self.context.kv_dtype.itemsize == 1
        wanted = self._options.prefill_kernel
        if wanted == "fa3" and not is_hopper:
            raise PluginError("attention.options.prefill_kernel fa3 needs a Hopper GPU (sm_90); use auto or fa2")
        if wanted == "fa3" and is_fp8:
            raise PluginError(
                "attention.options.prefill_kernel fa3 reads no fp8 cache for 16-bit queries; use auto or fa2"
            )
        if wanted == "auto" and (is_fp8 or not is_hopper):
            return "fa2"
        return wanted

    def _plan(self, wrapper: Any, host: HostPlan, indices: Tensor) -> None:
        context, spec = self.context, self.context.spec
        common: dict[str, Any] = {
            "window_left": -1 if spec.window is None else spec.window - 1,
            "logits_soft_cap": spec.soft_cap,
            "sm_scale": spec.scale,
            "q_data_type": context.dtype,
            "kv_data_type": context.kv_dtype,
            "seq_lens": host.seq_lens,
            "non_blocking": True,
        }
        shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim, context.block_size)
        if context.phase == "decode":
            wrapper.plan(host.indptr, indices, host.last_page_len, *shape, **common)
        else:
            wrapper.plan(host.query_indptr, host.indptr, indices, host.last_page_len, *shape, causal=True, **common)
