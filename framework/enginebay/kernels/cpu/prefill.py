"""Attention of several query tokens a row over the paged cache, compiled, for bfloat16 where the processor has avx512_bf16.

It reads the cache through the block table as it stands and keeps the law that ``prefill.cpp`` states: a query's result
depends on its own tokens only. Elsewhere the torch attention backend's own operators serve.

Shapes: ``R`` rows, ``T`` their tokens, ``H`` query heads, ``K`` KV heads, ``D`` head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from enginebay.kernels.cpu.ops import Kernel, attention_fields, has_linear, with_heads

_PREFILL_ATTENTION = Kernel("eb_prefill_attention", "PqP4qPqPPPqP6qddq")
#: features that the kernel takes at a time
_FEATURES = 64


def prefills(device_type: str, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether `prefill_attention` serves a cache and queries of this dtype and head size on this device."""
    return device_type == "cpu" and dtype == torch.bfloat16 and head_dim % _FEATURES == 0 and has_linear()


def prefill_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    lse: Tensor | None = None,
) -> None:
    """Causal attention of each row's last tokens over all its tokens so far, which the cache holds.

    query and out ``[T, H, D]``, heads contiguous; cache ``[blocks, 2, block, K, D]``; block_table int32 ``[R, B]``;
    query_start_loc int32 ``[R + 1]``; seq_lens int32 ``[R]``, queries included; lse float32 ``[T, H]`` contiguous, natural
    log. Positions past seq_len are not read.
    """
    query = with_heads(query, out, lse)
    _PREFILL_ATTENTION(
        query.data_ptr(),
        query.stride(0),
        cache.data_ptr(),
        *cache.stride()[:4],
        block_table.data_ptr(),
        block_table.stride(0),
        query_start_loc.data_ptr(),
        seq_lens.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        0 if lse is None else lse.data_ptr(),
        len(seq_lens),
        *attention_fields(query, cache, window, scale, soft_cap),
    )
