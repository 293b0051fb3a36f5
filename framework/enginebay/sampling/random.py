"""Counter-based randomness: the noise of a draw depends on (seed, output index, token id) and on nothing else.

So a request draws the same tokens whatever batch, slot, step or rank it runs in. The generator is Philox4x32-10 (Salmon,
Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the key is the seed, the counter is
``(token_id // 4, output_index, 0, 0)`` and output word ``token_id % 4`` is the token's.

Shapes: ``R`` rows, ``V`` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MUL0, _MUL1 = 0xD2511F53, 0xCD9E8D57
_WEYL0, _WEYL1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Ten rounds of Philox4x32 on 32-bit words held in int64 tensors that broadcast together; four int64 outputs."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 products wrap modulo 2^64, so both 32-bit halves come out right.
        p0, p1 = c0 * _MUL0, c2 * _MUL1
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL0) & _MASK, (k1 + _WEYL1) & _MASK
    return c0, c1, c2, c3


def gumbel(seed: Tensor, output_index: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise for every token of every row.

    Parameters
    ----------
    seed
        int64 ``[R]``, all 64 bits used.
    output_index
        int64 ``[R]``, index of the drawn token in its request's output.
    vocab_size
        ``V``.

    Returns
    -------
    float32 ``[R, V]`` on the seed's device; always finite.
    """
    groups = -(-vocab_size // 4)
    column = torch.arange(groups, device=seed.device, dtype=torch.int64).unsqueeze(0)
    row_counter = (output_index & _MASK).unsqueeze(1)
    zero = torch.zeros_like(row_counter)
    key = ((seed & _MASK).unsqueeze(1), ((seed >> 32) & _MASK).unsqueeze(1))
    words = torch.stack(philox4x32((column, row_counter, zero, zero), key), dim=-1)
    words = words.reshape(seed.shape[0], groups * 4)[:, :vocab_size]
    # v in (0, 1): small v keeps full relative precision, where the winners of the race are. Large words round to v = 1, whose
    # noise is -inf: a row's only unfiltered token would then tie with the filtered ones (C40), so v stays below 1.
    v = words.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()
