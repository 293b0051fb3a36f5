"""Writing a step's keys and values into the paged cache: the torch twin of the fused kernel.

Shapes: ``T`` tokens, ``K`` KV heads, ``D`` head size.
"""

from __future__ import annotations

from torch import Tensor


def reshape_and_cache(key_value: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
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
    """
    block_size = cache.shape[2]
    slots = slot_mapping.clamp_min(0)
    blocks = slots // block_size
    offsets = slots.sub_(blocks, alpha=block_size)
    cache.transpose(1, 2).index_put_((blocks, offsets), key_value.to(cache.dtype))
