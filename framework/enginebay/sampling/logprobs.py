"""Log-probabilities on the device: the token that stands at a position, the likeliest ones, and the token's rank.

It knows logits and token ids; what a request asks, and when, is known elsewhere.

Shapes: ``n`` positions, ``V`` vocabulary, ``K`` likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from enginebay.interfaces.scheduler import TokenLogprobs

#: of the model's own logits or of what remains to be drawn from; as log-probabilities or as logits
LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


@dataclass(slots=True)
class Scores:
    """`TokenLogprobs` in tensors."""

    #: int32 ``[n, 1 + K]``
    token_ids: Tensor
    #: float32 ``[n, 1 + K]``
    values: Tensor
    #: int32 ``[n]``
    ranks: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Scores:
        """These with each tensor put through `function`."""
        return Scores(function(self.token_ids), function(self.values), function(self.ranks))

    def to_host(self) -> TokenLogprobs:
        """As arrays; the tensors must be on the host."""
        return TokenLogprobs(self.token_ids.numpy(), self.values.numpy(), self.ranks.numpy())


def score(logits: Tensor, token_ids: Tensor, num_top: int, *, as_logits: bool) -> Scores:
    """Score `token_ids` by the logits of their positions.

    Parameters
    ----------
    logits
        ``[n, V]``, any floating dtype; not modified.
    token_ids
        int64 ``[n]``, the token at each position; one outside the vocabulary (-1: none) counts as impossible.
    num_top
        ``K``: likeliest tokens wanted besides, at most ``V``; -1 wants all.
    as_logits
        Return the logits themselves instead of their log-softmax.
    """
    values = logits.float()
    vocab = values.shape[1]
    if not as_logits:
        values = values.log_softmax(dim=-1)
    known = (token_ids >= 0) & (token_ids < vocab)
    own = values.gather(1, torch.where(known, token_ids, 0).unsqueeze(1))
    own = torch.where(known.unsqueeze(1), own, -torch.inf)
    ranks = (values >= own).sum(dim=1, dtype=torch.int32)
    top = _likeliest(values, vocab if num_top < 0 else min(num_top, vocab))
    return Scores(
        torch.cat([token_ids.unsqueeze(1).int(), top.int()], dim=1),
        torch.cat([own, values.gather(1, top)], dim=1),
        ranks,
    )


def _likeliest(values: Tensor, num_top: int) -> Tensor:
    """The `num_top` likeliest tokens of each row, int64 ``[n, K]``; of equal ones those with the smaller ids, in order.

    `topk` leaves both open, so that a row's tokens would depend on how many a neighbour asks for.
    """
    if num_top == 0:
        return torch.empty(len(values), 0, dtype=torch.int64, device=values.device)
    if num_top == values.shape[1]:
        return values.sort(dim=1, descending=True, stable=True).indices
    top = values.topk(num_top + 1, dim=1)
    ids, highest = top.indices[:, :-1], top.values[:, :-1]
    if values.device.type == "cpu":
        tied = (highest[:, -1] == top.values[:, -1]).nonzero().squeeze(1)
        if len(tied):
            ids = ids.index_copy(0, tied, _smallest_at_border(values[tied], ids[tied], highest[tied]))
    else:
        # To look which rows are tied would mean to wait for the device.
        ids = _smallest_at_border(values, ids, highest)
    ids = ids.sort(dim=1).values
    return ids.gather(1, values.gather(1, ids).sort(dim=1, descending=True, stable=True).indices)


def _smallest_at_border(values: Tensor, ids: Tensor, highest: Tensor) -> Tensor:
    """`ids` of the `highest` (both ``[n, K]``, descending), with the smallest ids that equal the last in their places."""
    vocab, least = values.shape[1], highest[:, -1:]
    descending = torch.arange(vocab, 0, -1, dtype=torch.int32, device=values.device)
    equal = vocab - torch.where(values == least, descending, 0).topk(ids.shape[1], dim=1).values.long()
    place = torch.arange(ids.shape[1], device=values.device)
    num_above = (highest > least).sum(dim=1, keepdim=True)
    # NaN equals nothing, itself included: the id must still be one of the vocabulary.
    border = equal.gather(1, (place - num_above).clamp_(min=0)).clamp_(max=vocab - 1)
    return torch.where(place < num_above, ids, border)
