"""The sampler: logits in, token ids out. It knows rows and their parameters; it does not know requests or steps.

Greedy rows take the exact argmax of the raw logits (C32, C33). The others divide by temperature, filter by min_p, top_k and
top_p in that order, and take the argmax after adding Gumbel noise, which draws from the filtered softmax.

Shapes: ``R`` rows, ``V`` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from enginebay.kernels.argmax import argmax
from enginebay.sampling.random import gumbel


@dataclass(slots=True)
class SamplingRows:
    """The sampling state of a step's rows."""

    #: float32 ``[R]``; 0 is greedy
    temperature: Tensor
    #: float32 ``[R]``, in (0, 1]
    top_p: Tensor
    #: int64 ``[R]``; 0 keeps all
    top_k: Tensor
    #: float32 ``[R]``, in [0, 1]
    min_p: Tensor
    #: int64 ``[R]``
    seed: Tensor
    #: int64 ``[R]``
    output_index: Tensor
    #: known on the host: every row is greedy, so no noise is needed
    all_greedy: bool
    #: known on the host: some row filters
    any_top_k_or_p: bool
    any_min_p: bool


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Draw one token a row.

    Parameters
    ----------
    logits
        ``[R, V]`` in any floating dtype; not modified.
    rows
        Parameters of the same rows.

    Returns
    -------
    int64 ``[R]``.
    """
    greedy = argmax(logits)
    if rows.all_greedy:
        return greedy
    scaled, _ = scale(logits, rows, greedy)
    return draw(filtered(scaled, rows), rows, greedy)


def scale(logits: Tensor, rows: SamplingRows, greedy: Tensor) -> tuple[Tensor, Tensor]:
    """Logits over temperature, less what makes each row's maximum 0, float32 ``[R, V]``; and that, float32 ``[R, 1]``.

    `greedy` is the argmax, int64 ``[R]``. Greedy rows are divided by 1.
    """
    # The row's maximum becomes 0 before the division, so that no temperature, however small, overflows to equal infinities.
    temperature = torch.where(rows.temperature == 0.0, 1.0, rows.temperature).unsqueeze(1)
    values = logits.float()
    highest = values.gather(1, greedy.unsqueeze(1))
    return (values - highest) / temperature, highest / temperature


def filtered(scaled: Tensor, rows: SamplingRows) -> Tensor:
    """What min_p, top_k and top_p leave of `scaled`, float32 ``[R, V]``; the rest is -inf."""
    if rows.any_min_p:
        scaled = apply_min_p(scaled, rows.min_p)
    if rows.any_top_k_or_p:
        scaled = apply_top_k_top_p(scaled, rows.top_k, rows.top_p)
    return scaled


def draw(scaled: Tensor, rows: SamplingRows, greedy: Tensor) -> Tensor:
    """A token a row from the softmax of `scaled`, or `greedy` where the row is; int64 ``[R]``."""
    drawn = (scaled + gumbel(rows.seed, rows.output_index, scaled.shape[-1])).argmax(dim=-1)
    return torch.where(rows.temperature == 0.0, greedy, drawn)


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Mask tokens less likely than ``min_p`` times the likeliest one.

    logits: float32 ``[R, V]``; min_p: float32 ``[R]``. Returns float32 ``[R, V]``, masked entries -inf.
    """
    # p_i / p_max = exp(l_i - l_max), so no softmax is needed; log(0) = -inf keeps everything.
    floor = logits.amax(dim=-1, keepdim=True) + min_p.log().unsqueeze(1)
    return logits.masked_fill(logits < floor, -torch.inf)


def apply_top_k_top_p(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Mask all but the ``top_k`` likeliest, then all but the smallest set of those that reaches ``top_p``.

    logits: float32 ``[R, V]``; top_k: int64 ``[R]`` (0 keeps all); top_p: float32 ``[R]``. Returns float32 ``[R, V]``,
    masked entries -inf. Ties at the border are decided by the sort, so exactly top_k tokens are kept.
    """
    vocab = logits.shape[-1]
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=logits.device).unsqueeze(0)
    keep_count = torch.where(top_k <= 0, vocab, top_k).unsqueeze(1)
    ordered = ordered.masked_fill(rank >= keep_count, -torch.inf)
    probability = ordered.softmax(dim=-1)
    # The mass before a token decides: the one that crosses top_p stays, and so does always the first.
    before = probability.cumsum(dim=-1) - probability
    drop = (before >= top_p.unsqueeze(1)) & (top_p < 1.0).unsqueeze(1)
    drop[:, 0] = False
    ordered = ordered.masked_fill(drop, -torch.inf)
    return torch.empty_like(logits).scatter_(1, index, ordered)
