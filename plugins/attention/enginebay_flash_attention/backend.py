"""The backend: one call of FlashAttention-4 a layer, over the batch's own tensors; there is nothing to plan.

The library's public functions allocate their result, so the function below them is called, which writes into `out`; its
parameters move, hence the record's one version. Lengths and block ids are read on the device. Queries of a decode step go in
as rows of one token, which spares the kernel the search for the row that a block of threads belongs to; those of a prefill
step as ragged rows. The longest query is not told: the kernels do not need it on Hopper, and the library would compile
another variant for short ones.

Keys and values are views of the cache with its strides, in 64-bit arithmetic. A cache block of one key tile (128 tokens up to
head size 128) is loaded whole by TMA, so what lies past a row's last token must be finite; other sizes are loaded token by
token, a little slower.

Source: https://github.com/Dao-AILab/flash-attention, ``flash_attn/cute``; Shah et al., FlashAttention-3, arXiv 2407.08608.

Shapes: ``R`` rows, ``T`` tokens, ``H`` query heads, ``K`` KV heads, ``D`` head size.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from enginebay.interfaces.attention import (
    AttentionBackend,
    AttentionContext,
    AttentionLayer,
    PlanState,
    require_layout,
)
from enginebay.interfaces.batch import Bucket, PhaseBatch
from enginebay.plugins.records import HND, NHD
from torch import Tensor

#: queries times heads a KV head that a block of threads takes, at least
_QUERY_TILE = 128


class FlashAttention(AttentionBackend):
    """Paged attention of one plan group in one phase through FlashAttention-4.

    Raises
    ------
    PluginError
        A layout other than NHD and HND.
    """

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        require_layout("flash_attention", context.layout, (NHD, HND))
        spec = context.spec
        self._is_decode = context.phase == "decode"
        self._settings: dict[str, Any] = {"softmax_scale": spec.scale, "causal": True}
        if spec.window is not None:
            self._settings["window_size_left"] = spec.window - 1
        if spec.soft_cap is not None:
            self._settings["score_mod"] = soft_cap(spec.soft_cap)
        from flash_attn.cute.interface import _flash_attn_fwd

        # the library's own argument, of no use here: each kernel that is compiled would warn of it
        warnings.filterwarnings("ignore", "Argument aux_data .* cannot be converted to a JitArgument", UserWarning)
        self._forward = _flash_attn_fwd

    def workspace_bytes(self, bucket: Bucket) -> int:
        """What a call allocates: prefill's lse by heads, and the library's table of rows where there are many."""
        if self._is_decode:
            return 0
        spec = self.context.spec
        tokens = min(bucket.rows * bucket.query_len, self.context.max_num_tokens)
        tiles = tokens * (spec.num_heads // spec.num_kv_heads) // _QUERY_TILE + bucket.rows + 1
        return 4 * (spec.num_heads * tokens + bucket.rows + 1 + tiles)

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
        starts, by_head = None, None
        if self._is_decode:
            query, out = query.unsqueeze(1), out.unsqueeze(1)
            if lse is not None:
                by_head = lse.unsqueeze(2)
        else:
            starts = batch.query_start_loc
            if lse is not None:
                by_head = torch.empty(lse.shape[::-1], dtype=torch.float32, device=lse.device)
        self._forward(
            query,
            cache[:, 0],
            cache[:, 1],
            cu_seqlens_q=starts,
            seqused_k=batch.seq_lens,
            page_table=batch.groups[self.context.group].block_table,
            learnable_sink=layer.sinks,
            out=out,
            lse=by_head,
            **self._settings,
        )
        if lse is not None and by_head is not None and not self._is_decode:
            lse.copy_(by_head.T)


def soft_cap(cap: float) -> Any:
    """The library's own soft cap, made once: given as a number it is made and hashed anew in each call, 150 µs each."""
    from flash_attn.cute import utils

    return utils.create_softcap_scoremod(cap)
