"""What GGUF's encoded rows mean, straight from the layout of their blocks, in plain torch; and how K blocks are filled.

Written apart from the decoder in use, for samples to be compared with. It knows bytes of rows and no file.

Layouts: ggml's ``ggml-common.h`` and ``ggml-quants.c`` (``dequantize_row_*``). Shapes: ``B`` blocks, each of 32 weights, or of
256 in sub-blocks of 16 or 32 whose scales are integers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _take(blocks: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Consecutive fields of uint8 blocks ``[B, bytes]``, of `sizes` bytes."""
    return torch.split(blocks, list(sizes), dim=1)


def _half(field: Tensor) -> Tensor:
    """Two bytes as a float16 number, float32 ``[B, 1]``."""
    return field.contiguous().view(torch.float16).float()


def _halves(packed: Tensor) -> Tensor:
    """Low nibbles, then high ones: ``[B, n]`` to ``[B, 2 n]``."""
    return torch.cat([packed & 15, packed >> 4], 1).float()


def _fifth_bits(field: Tensor) -> Tensor:
    """32 bits of four bytes, as 0 or 16, ``[B, 32]``."""
    return (field[:, :, None] >> torch.arange(8) & 1).flatten(1).float() * 16


def _q4_0(blocks: Tensor) -> Tensor:
    d, q = _take(blocks, 2, 16)
    return (_halves(q) - 8) * _half(d)


def _q4_1(blocks: Tensor) -> Tensor:
    d, m, q = _take(blocks, 2, 2, 16)
    return _halves(q) * _half(d) + _half(m)


def _q5_0(blocks: Tensor) -> Tensor:
    d, high, q = _take(blocks, 2, 4, 16)
    return (_halves(q) + _fifth_bits(high) - 16) * _half(d)


def _q5_1(blocks: Tensor) -> Tensor:
    d, m, high, q = _take(blocks, 2, 2, 4, 16)
    return (_halves(q) + _fifth_bits(high)) * _half(d) + _half(m)


def _q8_0(blocks: Tensor) -> Tensor:
    d, q = _take(blocks, 2, 32)
    return q.contiguous().view(torch.int8).float() * _half(d)


def _sub_scales(field: Tensor) -> tuple[Tensor, Tensor]:
    """Six-bit scales and minima of 8 sub-blocks, from 12 bytes::

    byte   0..3               4..7               8..11
    holds  scale 0..3, with   min 0..3, with     low nibble of scale 4..7,
           scale 4..7's top   min 4..7's top     low nibble of min 4..7
    """
    a, b, c = _take(field, 4, 4, 4)
    scales = torch.cat([a & 63, (c & 15) | (a >> 6 << 4)], 1)
    minima = torch.cat([b & 63, (c >> 4) | (b >> 6 << 4)], 1)
    return scales.float(), minima.float()


def _with_minima(d: Tensor, dmin: Tensor, packed: Tensor, q: Tensor) -> Tensor:
    scales, minima = _sub_scales(packed)
    return ((_half(d) * scales)[:, :, None] * q - (_half(dmin) * minima)[:, :, None]).flatten(1)


def _nibbles_of_64(packed: Tensor) -> Tensor:
    """32 bytes hold two sub-blocks of 32: ``[B, 128]`` to ``[B, 8, 32]``."""
    quarters = packed.view(-1, 4, 32)
    return torch.stack([quarters & 15, quarters >> 4], 2).flatten(1, 2).float()


def _q4_k(blocks: Tensor) -> Tensor:
    d, dmin, packed, q = _take(blocks, 2, 2, 12, 128)
    return _with_minima(d, dmin, packed, _nibbles_of_64(q.contiguous()))


def _q5_k(blocks: Tensor) -> Tensor:
    d, dmin, packed, high, q = _take(blocks, 2, 2, 12, 32, 128)
    fifth = (high[:, None, :] >> torch.arange(8)[:, None] & 1).float()
    return _with_minima(d, dmin, packed, _nibbles_of_64(q.contiguous()) + 16 * fifth)


def _q6_k(blocks: Tensor) -> Tensor:
    low, high, scales, d = _take(blocks, 128, 64, 16, 2)
    nibbles = low.contiguous().view(-1, 2, 1, 2, 32) >> torch.tensor([0, 4])[:, None, None] & 15
    pairs = high.contiguous().view(-1, 2, 1, 32) >> torch.tensor([0, 2, 4, 6])[:, None] & 3
    q = (nibbles.flatten(2, 3) | pairs << 4).float() - 32
    sub = _half(d) * scales.contiguous().view(torch.int8).float()
    return (q.view(-1, 16, 16) * sub[:, :, None]).flatten(1)


#: type -> the weights of blocks uint8 ``[B, bytes a block]``, float32 ``[B, weights a block]``
MEANINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


# --- K blocks, which the gguf package does not write -----------------------------------------------------------------


def _bytes(half: Tensor) -> Tensor:
    return half.to(torch.float16).contiguous().view(torch.uint8)


def _filled_with_minima(weights: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Head of 16 bytes, and codes uint8 ``[B, 8, 32]`` of blocks ``[B, 256]``."""
    sub = weights.view(-1, 8, 32)
    lowest = sub.amin(2).clamp(max=0)
    spread = (sub.amax(2) - lowest) / (2**bits - 1)
    d = (spread.amax(1, keepdim=True) / 63).to(torch.float16).float()
    dmin = (-lowest.amin(1, keepdim=True) / 63).to(torch.float16).float()
    scales, minima = ((x / unit.clamp(min=1e-8)).round().clamp(0, 63) for x, unit in ((spread, d), (-lowest, dmin)))
    step = (d * scales).clamp(min=1e-8)[:, :, None]
    codes = ((sub + (dmin * minima)[:, :, None]) / step).round().clamp(0, 2**bits - 1).to(torch.uint8)
    s, m = scales.to(torch.uint8), minima.to(torch.uint8)
    packed = [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4]
    return torch.cat([_bytes(d), _bytes(dmin), *packed], 1), codes


def _fill_q4_k(weights: Tensor) -> Tensor:
    head, codes = _filled_with_minima(weights, 4)
    return torch.cat([head, (codes[:, 0::2] | codes[:, 1::2] << 4).flatten(1)], 1)


def _fill_q5_k(weights: Tensor) -> Tensor:
    head, codes = _filled_with_minima(weights, 5)
    fifth = (codes >> 4 << torch.arange(8, dtype=torch.uint8)[:, None]).sum(1, dtype=torch.uint8)
    low = codes & 15
    return torch.cat([head, fifth, (low[:, 0::2] | low[:, 1::2] << 4).flatten(1)], 1)


def _fill_q6_k(weights: Tensor) -> Tensor:
    sub = weights.view(-1, 16, 16)
    sizes = sub.abs().amax(2) / 31
    d = (sizes.amax(1, keepdim=True) / 127).to(torch.float16).float()
    scales = (sizes / d.clamp(min=1e-8)).round().clamp(1, 127)
    codes = (sub / (d * scales).clamp(min=1e-8)[:, :, None]).round().clamp(-32, 31) + 32
    rows = codes.to(torch.uint8).view(-1, 2, 4, 32)
    low = (rows[:, :, :2] & 15 | (rows[:, :, 2:] & 15) << 4).flatten(1)
    high = (rows >> 4 << torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]).sum(2, dtype=torch.uint8).flatten(1)
    return torch.cat([low, high, scales.to(torch.int8).view(torch.uint8), _bytes(d)], 1)


#: type -> blocks uint8 ``[B, bytes a block]`` of weights float32 ``[B, 256]``
FILLS: dict[str, Callable[[Tensor], Tensor]] = {"Q4_K": _fill_q4_k, "Q5_K": _fill_q5_k, "Q6_K": _fill_q6_k}
