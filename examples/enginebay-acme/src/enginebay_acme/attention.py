"""Attention of some rows at once, padded to the longest of them. What all layers share is made once a step, in `plan`.

Shapes: ``T`` tokens of the step, ``R`` rows of a piece, ``Q`` new tokens of its longest row, ``C`` blocks of a row, ``S`` their
tokens, ``H`` query heads, ``K`` KV heads, ``G = H / K``, ``D`` head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from enginebay.interfaces.attention import AttentionBackend, AttentionLayer, PlanState
from enginebay.interfaces.batch import Bucket, PhaseBatch
from torch import Tensor

from enginebay_acme.options import AttentionOptions


@dataclass(frozen=True)
class Piece:
    """Some successive rows of a step."""

    #: the piece's tokens among the step's
    tokens: slice
    #: int64 ``[R, C]``: blocks to gather, the null block where a row has none
    blocks: Tensor
    #: bool ``[R, S]``: whether a gathered token is one of the row's
    exists: Tensor
    #: int64 ``[R, Q]``: where each row's new tokens stand among the piece's, padded with the piece's last
    gather: Tensor
    #: int64, ``[piece's tokens]`` each: the row of a token, and which of its new ones it is
    row: Tensor
    offset: Tensor
    #: bool ``[R, Q, S]``: whether a query sees a key
    sees: Tensor


class Plan(PlanState):
    """A step in pieces."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        self.pieces: list[Piece] = []


class PaddedAttention(AttentionBackend):
    """Softmax in float32, whatever the dtypes."""

    def make_state(self, bucket: Bucket) -> Plan:
        """An empty plan: it is as large as its step."""
        return Plan(bucket)

    def plan(self, batch: PhaseBatch, state: PlanState) -> None:
        """Cut the step into pieces of ``rows_at_once`` rows."""
        assert isinstance(state, Plan)
        assert isinstance(self.context.options, AttentionOptions)
        step = self.context.options.rows_at_once
        state.pieces = [
            self._piece(batch, first, min(first + step, batch.num_rows)) for first in range(0, batch.num_rows, step)
        ]

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
        """Let every row's new tokens, ``query [T, H, D]``, attend to all its tokens; write ``out [T, H, D]``."""
        assert isinstance(state, Plan)
        for piece in state.pieces:
            mixed, sums = attend_padded(layer, query[piece.tokens].float()[piece.gather], cache, piece)
            out[piece.tokens] = mixed[piece.row, piece.offset].to(out.dtype)
            if lse is not None:
                lse[piece.tokens] = sums[piece.row, piece.offset]

    def _piece(self, batch: PhaseBatch, first: int, last: int) -> Piece:
        size, table = self.context.block_size, batch.groups[self.context.group].block_table[first:last]
        columns = min(-(-batch.max_seq_len // size), table.shape[1])
        lengths = batch.seq_lens[first:last, None].long()  # [R, 1]
        starts_host = batch.query_start_loc_host[first : last + 1]
        starts = batch.query_start_loc[first : last + 1].long() - int(starts_host[0])
        new = torch.arange(int((starts_host[1:] - starts_host[:-1]).max()))  # [Q]
        tokens = torch.arange(int(starts_host[-1] - starts_host[0]))
        row = torch.searchsorted(starts[1:], tokens, right=True)
        keys = torch.arange(columns * size)  # [S]
        exists = keys < lengths
        # padded queries see what the row's last token sees: they are not read, and must not be NaN by having no key
        positions = (lengths - starts.diff()[:, None] + new).minimum(lengths - 1)[:, :, None]  # [R, Q, 1]
        sees = exists[:, None] & (keys <= positions)
        if self.context.spec.window is not None:
            sees &= keys > positions - self.context.spec.window
        return Piece(
            tokens=slice(int(starts_host[0]), int(starts_host[-1])),
            blocks=table[:, :columns].long().where(exists[:, ::size], 0),
            exists=exists,
            gather=(starts[:-1, None] + new).clamp(max=len(tokens) - 1),
            row=row,
            offset=tokens - starts[row],
            sees=sees,
        )


def attend_padded(layer: AttentionLayer, query: Tensor, cache: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
    """Output float32 ``[R, Q, H, D]`` and log-sum-exp ``[R, Q, H]`` of ``query [R, Q, H, D]``, padded queries included."""
    spec = layer.spec
    keys, values = cache[piece.blocks].float().unbind(2)  # [R, C, block, K, D]
    keys, values = keys.flatten(1, 2), values.flatten(1, 2)  # [R, S, K, D]
    # what lies past a row's last token may be anything, and 0 x NaN is NaN
    values = values.masked_fill(~piece.exists[:, :, None, None], 0)
    heads = query.reshape(*query.shape[:2], spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim)
    scores = torch.einsum("rqkgd,rskd->rqkgs", heads, keys) * spec.scale
    if spec.soft_cap is not None:
        scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
    scores = scores.masked_fill(~piece.sees[:, :, None, None], -math.inf).flatten(2, 3)  # [R, Q, H, S]
    sums = scores.logsumexp(-1)
    if layer.sinks is not None:
        sums = torch.logaddexp(sums, layer.sinks)
    weights = (scores - sums[..., None]).exp().reshape(*heads.shape[:-1], -1)  # [R, Q, K, G, S]
    return torch.einsum("rqkgs,rskd->rqkgd", weights, values).flatten(2, 3), sums
