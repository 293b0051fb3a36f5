"""Token embedding and output head, split by vocabulary over ranks.

The vocabulary is padded with zero rows to a multiple of 64 a rank, so that ranks are equal and matrix products aligned;
the padding's logits are cut off before anything reads them.

Shapes: ``T`` tokens, ``L`` tokens whose logits are wanted, ``d`` row length, ``V`` vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from enginebay.interfaces.quant import Axis, EmbeddingMethod, LayerInfo, Part, Shard, WeightSpec
from enginebay.kernels.packed_linear import PackedMatrix, pack
from enginebay.layers.parallel import TensorParallel
from enginebay.layers.weights import WeightModule

#: rows a rank are a multiple of this
VOCAB_ALIGNMENT = 64


class PlainEmbedding(EmbeddingMethod):
    """Rows as they are, in the compute dtype; on CPU a layer that yields logits packs them. One instance a layer.

    A tied matrix then exists twice where the packed order does not let rows be read: rows to look up, and packed.
    """

    replayable = True

    def __init__(self) -> None:
        self._packed: PackedMatrix | None = None
        self._has_rows = True

    def weights(self, layer: LayerInfo) -> dict[str, WeightSpec]:
        """One matrix ``[V, d]``."""
        return {"weight": WeightSpec(axes=(Axis("out"), Axis("in")), dtype=layer.dtype)}

    def embed(self, layer: nn.Module, ids: Tensor) -> Tensor:
        """Look rows up."""
        if not self._has_rows and self._packed is not None:
            rows = self._packed.rows(ids)
            assert rows is not None
            return rows
        weight: Tensor = layer.weight  # type: ignore[assignment]
        return functional.embedding(ids, weight)

    def logits(self, layer: nn.Module, x: Tensor) -> Tensor:
        """One matrix product."""
        if self._packed is not None:
            return self._packed.product(x, None)
        weight: Tensor = layer.weight  # type: ignore[assignment]
        return functional.linear(x, weight)

    def finish_loading(self, layer: nn.Module) -> None:
        """Pack where that pays."""
        weight = layer.get_parameter("weight")
        if not (isinstance(layer, VocabEmbedding) and layer.is_head):
            return
        self._packed = pack(weight)
        if self._packed is None:
            return
        readable = self._packed.rows(torch.zeros(1, dtype=torch.int64)) is not None
        if readable or layer.info.kind == "head":
            self._has_rows = False
            weight.data = weight.data.new_empty(0)


def vocab_shard(vocab_size: int, rank: int, world: int) -> Shard:
    """The rows of `rank`, padding included."""
    rows = -(-vocab_size // (VOCAB_ALIGNMENT * world)) * VOCAB_ALIGNMENT
    return Shard(rank * rows, (rank + 1) * rows, vocab_size)


def vocab_layer(
    name: str,
    kind: Literal["embedding", "head"],
    vocab_size: int,
    size: int,
    dtype: torch.dtype,
    parallel: TensorParallel,
) -> LayerInfo:
    """The facts of an embedding or an untied head on this rank."""
    rows = vocab_shard(vocab_size, parallel.rank, parallel.world)
    return LayerInfo(name=name, kind=kind, parts=(Part("", rows),), input=Shard.whole(size), dtype=dtype)


class VocabEmbedding(WeightModule):
    """A matrix ``[V, d]`` that embeds ids, yields logits, or, when tied, both."""

    def __init__(
        self, info: LayerInfo, method: EmbeddingMethod, device: torch.device, parallel: TensorParallel
    ) -> None:
        super().__init__(info, device)
        self.method = method
        self._parallel = parallel
        self._rows = info.parts[0].out
        #: whether the matrix yields logits: an untied head, or an embedding that a head is tied to
        self.is_head = info.kind == "head"
        for name, spec in method.weights(info).items():
            self.add_weight(name, spec)

    @property
    def vocab_size(self) -> int:
        """Rows of the whole matrix, padding not counted."""
        return self._rows.total

    def forward(self, ids: Tensor) -> Tensor:
        """Ids int64 ``[T]`` to ``[T, d]``."""
        if self._parallel.world == 1:
            return self.method.embed(self, ids)
        local = ids - self._rows.start
        elsewhere = (local < 0) | (local >= self._rows.size)
        out = self.method.embed(self, local.clamp_(0, self._rows.size - 1))
        return self._parallel.comm.all_reduce(out.masked_fill_(elsewhere.unsqueeze(-1), 0))

    def logits(self, x: Tensor) -> Tensor:
        """``[L, d]`` to ``[L, V]``."""
        out = self._parallel.comm.all_gather(self.method.logits(self, x))
        return out[:, : self.vocab_size]

    def _rearrange(self) -> None:
        self.method.finish_loading(self)
