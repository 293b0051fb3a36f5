"""Writing a step's keys and values into the paged cache: the torch twin of the fused kernel.

Shapes: ``T`` tokens, ``K`` KV heads, ``D`` head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: beyond it, fp8 e4m3 has no number
FP8_MAX = 448.0


def reshape_and_cache(
    key_value: Tensor, cache: Tensor, slot_mapping: Tensor, k_scale: float = 1.0, v_scale: float = 1.0
) -> None:
    """Scatter each token's key and value to its slot.

    Parameters
    ----------
    key_value
        ``[T, 2, K, D]``, keys at index 0; any strides.
    cache
        ``[blocks, 2, block, K, D]``, any strides; written in its own dtype.
    slot_mapping
        int64 ``[T]``: block id x block size + offset. A token with slot -1 lands in slot 0 of the null block, whose
        content has no meaning (a scatter without a mask keeps every shape fixed); no other block is touched.
    k_scale, v_scale
        What keys and values are divided by on their way into an fp8 cache, where they are clamped to its range.
    """
    block_size = cache.shape[2]
    slots = slot_mapping.clamp_min(0)
    blocks = slots // block_size
    offsets = slots.sub_(blocks, alpha=block_size)
    if cache.dtype.itemsize > 1:
        cache.transpose(1, 2).index_put_((blocks, offsets), key_value.to(cache.dtype))
        return
    scales = torch.tensor((k_scale, v_scale), device=key_value.device)[:, None, None]
    kept = (key_value.float() / scales).clamp_(-FP8_MAX, FP8_MAX).to(cache.dtype)
    # torch scatters bytes, but no fp8
    cache.view(torch.uint8).transpose(1, 2).index_put_((blocks, offsets), kept.view(torch.uint8))
