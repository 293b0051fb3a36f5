"""An attention backend straight from the definition, slow and on any device: what other kinds' laws run a model over.

Its softmax is float32 whatever the dtypes. Shapes: ``Q`` queries of a row, ``S`` tokens of a row, ``H`` query heads, ``K`` KV
heads, ``D`` head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from enginebay.interfaces.attention import AttentionBackend, AttentionLayer, PlanState
from enginebay.interfaces.batch import PhaseBatch


class PlainAttention(AttentionBackend):
    """One row at a time. Each step of the definition is a method of its own, so that one can be replaced."""

    def plan(self, batch: PhaseBatch, state: PlanState) -> None:
        """The lengths, read on the device."""
        vars(state)["lens"] = [int(n) for n in batch.seq_lens]

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
        """See `AttentionBackend.attend`."""
        starts = batch.query_start_loc.tolist()
        for row in range(batch.num_rows):
            tokens = slice(starts[row], starts[row + 1])
            seq = self.seq_len(batch, state, row)
            keys, values = self.keys_and_values(layer, cache, batch, row, seq)
            scores = self.scores(layer, query[tokens], keys)
            scores = scores.masked_fill(self.hidden(layer, scores.shape[1], seq).to(scores.device), -math.inf)
            if layer.spec.sinks:
                sinks = self.sinks(layer)
                scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], -1)
            sums = scores.logsumexp(-1)
            weights = (scores - sums[..., None]).exp()[..., :seq]
            out[tokens] = torch.einsum("hqs,shd->qhd", weights, self.spread(values, layer)).to(out.dtype)
            if lse is not None:
                lse[tokens] = self.lse(sums, layer).T

    def seq_len(self, batch: PhaseBatch, state: PlanState, row: int) -> int:
        """Tokens of a row, this step's included."""
        return int(vars(state)["lens"][row])

    def table(self, batch: PhaseBatch, row: int) -> Tensor:
        """A row's line of the block table."""
        return batch.groups[self.context.group].block_table[row]

    def blocks(self, batch: PhaseBatch, row: int, seq: int) -> Tensor:
        """Ids of the blocks that hold a row's tokens."""
        return self.table(batch, row)[: -(-seq // self.context.block_size)].long()

    def keys_and_values(
        self, layer: AttentionLayer, cache: Tensor, batch: PhaseBatch, row: int, seq: int
    ) -> tuple[Tensor, Tensor]:
        """True values of a row's keys and values, float32 ``[S, K, D]`` each."""
        blocks = self.blocks(batch, row, seq)
        keys, values = (cache[blocks, i].float().flatten(0, 1)[:seq] for i in (0, 1))
        return keys * layer.k_scale, values * layer.v_scale

    def spread(self, x: Tensor, layer: AttentionLayer) -> Tensor:
        """KV heads for each query head: ``[S, K, D]`` to ``[S, H, D]``."""
        return x.repeat_interleave(layer.spec.num_heads // layer.spec.num_kv_heads, 1)

    def scores(self, layer: AttentionLayer, query: Tensor, keys: Tensor) -> Tensor:
        """Scaled and capped scores ``[H, Q, S]``."""
        scores = torch.einsum("qhd,shd->hqs", query.float(), self.spread(keys, layer)) * layer.spec.scale
        return scores if layer.spec.soft_cap is None else self.cap(scores, layer.spec.soft_cap)

    def cap(self, scores: Tensor, cap: float) -> Tensor:
        """The soft cap."""
        return cap * torch.tanh(scores / cap)

    def hidden(self, layer: AttentionLayer, queries: int, seq: int) -> Tensor:
        """Which keys each query does not see, ``[Q, S]``."""
        distance = torch.arange(seq - queries, seq)[:, None] - torch.arange(seq)
        return self.outside(distance, layer.spec.window or seq)

    def outside(self, distance: Tensor, window: int) -> Tensor:
        """Whether a key that far back is out of sight."""
        return (distance < 0) | (distance >= window)

    def sinks(self, layer: AttentionLayer) -> Tensor:
        """The learned logit a head, ``[H]``."""
        assert layer.sinks is not None
        return layer.sinks

    def lse(self, sums: Tensor, layer: AttentionLayer) -> Tensor:
        """``[H, Q]``, what is given as lse."""
        return sums
