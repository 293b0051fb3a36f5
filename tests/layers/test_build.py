"""The builder: sharing of sizes over ranks, shared tables, padded vocabularies, and methods of the wrong kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from enginebay.errors import ModelError
from enginebay.interfaces.quant import EmbeddingMethod, LayerInfo, LinearMethod, QuantContext, Quantizer
from enginebay.layers.build import ModelBuilder
from enginebay.layers.embedding import PlainEmbedding, vocab_shard
from enginebay.layers.linear import PlainLinear
from enginebay.layers.parallel import TensorParallel
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor


class Sum:
    """Keeps what a rank would have sent."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.sent.append(tensor)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        self.sent.append(tensor)
        return torch.cat((tensor, tensor), -1)


def builder(**changes: Any) -> ModelBuilder:
    fields: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "max_model_len": 32}
    return ModelBuilder(**(fields | changes))


@given(vocab=st.integers(1, 5000), world=st.integers(1, 8))
def test_vocabulary_shards_are_equal_aligned_and_complete(vocab: int, world: int) -> None:
    """C39: what is beyond the vocabulary is padding, and is known to be."""
    shards = [vocab_shard(vocab, rank, world) for rank in range(world)]
    assert len({shard.size for shard in shards}) == 1
    assert shards[0].size % 64 == 0
    assert sum(shard.filled for shard in shards) == vocab
    assert shards[-1].stop - vocab < 64 * world


def test_padding_never_reaches_the_logits() -> None:
    """C39: the padding rows' logits of 0 would beat a vocabulary of negative ones."""
    head = builder().head("lm_head", 70, 8)
    head.get_parameter("weight").data.fill_(-1.0)
    head.get_parameter("weight").data[70:] = 0.0
    logits = head.logits(torch.ones(2, 8))
    assert logits.shape == (2, 70)
    assert (logits == -8.0).all()


def test_a_rank_embeds_only_its_rows() -> None:
    comm = Sum()
    embedding = builder(rank=1, world=2, comm=comm).embedding("e", 100, 4)
    embedding.get_parameter("weight").data.copy_(torch.arange(64)[:, None].expand(64, 4))
    out = embedding(torch.tensor([0, 63, 64, 99]))
    assert out[:, 0].tolist() == [0, 0, 0, 35]
    assert len(comm.sent) == 1


@pytest.mark.parametrize(("rank", "adds"), [(0, True), (1, False)])
def test_one_rank_adds_the_bias_before_the_sum(rank: int, adds: bool) -> None:
    comm = Sum()
    layer = builder(rank=rank, world=2, comm=comm).linear("l", 8, 3, bias=True, split="row")
    layer.get_parameter("weight").data.zero_()
    layer.get_parameter("bias").data.fill_(5.0)
    assert layer(torch.ones(1, 4)).tolist() == [[5.0 * adds] * 3]
    assert len(comm.sent) == 1


@pytest.mark.parametrize("split", ["column", None])
def test_outputs_that_are_split_or_whole_are_not_summed(split: Any) -> None:
    comm = Sum()
    layer = builder(rank=1, world=2, comm=comm).linear("l", 8, 6, split=split)
    assert layer.info.out_features == (3 if split else 6)
    layer(torch.ones(1, 8))
    assert comm.sent == []


@given(kv_heads=st.sampled_from([1, 2, 4, 8]), world=st.sampled_from([1, 2, 4, 8]))
def test_kv_heads_match_their_query_heads(kv_heads: int, world: int) -> None:
    """Every rank holds the KV heads that its query heads read."""
    heads = 16
    for rank in range(world):
        place = TensorParallel(rank, world)
        first, count = place.kv_heads(kv_heads)
        mine = range(rank * heads // world, (rank + 1) * heads // world)
        assert {head * kv_heads // heads for head in mine} == set(range(first, first + count))


def test_equal_rotaries_are_one() -> None:
    config = transformers.LlamaConfig(hidden_size=32, num_attention_heads=4)
    build = builder()
    assert build.rotary(config) is build.rotary(config)
    assert build.rotary(config) is not build.rotary(transformers.LlamaConfig(hidden_size=32, num_attention_heads=4))


def test_a_group_needs_collectives() -> None:
    with pytest.raises(ModelError, match="2 ranks needs a communicator"):
        builder(world=2)


class Confused(Quantizer):
    """Gives every layer the other kind's method."""

    @classmethod
    def from_checkpoint(cls, context: QuantContext) -> Confused:
        return cls()

    def method_for(self, layer: LayerInfo) -> LinearMethod | EmbeddingMethod | None:
        return PlainEmbedding() if layer.kind == "linear" else PlainLinear()


def test_a_method_of_the_wrong_kind_is_refused() -> None:
    build = builder(quantizer=Confused())
    with pytest.raises(ModelError, match="l: Confused gave a linear layer a PlainEmbedding"):
        build.linear("l", 4, 4)
    with pytest.raises(ModelError, match="e: Confused gave the embedding a PlainLinear"):
        build.embedding("e", 4, 4)


def test_a_method_without_a_dense_weight_says_so() -> None:
    class Opaque(PlainLinear):
        dense_weight = LinearMethod.dense_weight

    class Quant(Confused):
        def method_for(self, layer: LayerInfo) -> LinearMethod | EmbeddingMethod | None:
            return Opaque()

    with pytest.raises(ModelError, match="Opaque cannot give the dense weight of l"):
        builder(quantizer=Quant()).linear("l", 4, 4).dense_weight()
    plain = builder().linear("l", 4, 4)
    assert torch.equal(plain.dense_weight(), plain.get_parameter("weight"))
