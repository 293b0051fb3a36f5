"""Rotary position embedding, half-split (NeoX) form, in place: the torch twin of the fused kernel.

Shapes: ``T`` tokens, ``H`` heads, ``D`` head size, ``R`` rotated leading features (``R <= D``), ``P`` positions.
The table holds, for each position, the cosines and the *signed* sines: ``[-sin | sin]``, so that the rotation
``(x1 cos - x2 sin | x2 cos + x1 sin)`` is one product with the swapped halves.
"""

from __future__ import annotations

from torch import Tensor


def apply_rope_(x: Tensor, positions: Tensor, table: Tensor) -> None:
    """Rotate heads in place.

    Parameters
    ----------
    x
        ``[T, H, D]``, any strides with a contiguous last axis; features from R on are left as they are.
    positions
        int64 ``[T]``, each below P.
    table
        ``[P, 2, R]`` in x's dtype.
    """
    width = table.shape[-1]
    cos, signed_sin = table.index_select(0, positions).unsqueeze(2).unbind(1)  # [T, 1, R] each
    rotated = x if width == x.shape[-1] else x[..., :width]
    swapped = rotated.roll(width // 2, -1)
    rotated.mul_(cos).addcmul_(swapped, signed_sin)
