"""What several laws ask of a loaded layer: products, rows and logits within rounding, and everything that can be called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from enginebay.conformance.quant.trial import BATCHES, Layers, Trial, off, off_weight
from enginebay.errors import ModelError
from enginebay.layers.embedding import VocabEmbedding
from enginebay.layers.linear import Linear


def dense_weight(layer: Linear) -> Tensor:
    """A layer's dense weight; skips where its method gives none, as it may."""
    try:
        return layer.dense_weight()
    except ModelError as error:
        pytest.skip(f"the method gives no dense weight: {error}")


def assert_products(trial: Trial, layer: Linear, matrix: Tensor, bias: Tensor | None = None) -> None:
    """Batches of 1, 7 and 32 tokens are multiplied by `matrix` ``[out, in]``, and `bias` ``[out]`` is added."""
    for tokens in BATCHES:
        x = trial.batch(layer, tokens)
        out = layer(x.clone())
        assert tuple(out.shape) == (tokens, matrix.shape[0]), f"{layer.name} of {tokens} tokens: {list(out.shape)}"
        share = off(trial, out, x, matrix, bias)
        assert share <= 1, f"{layer.name} of {tokens} tokens is off by {share:.3g} times what rounding explains"


def assert_rows(trial: Trial, layer: VocabEmbedding, rows: Tensor) -> None:
    """Rows by ids of this rank, first and last, out of order, twice."""
    last = layer.info.parts[0].out.filled - 1
    ids = torch.tensor([last, 0, last // 2, 1, last, 0])
    got = layer.method.embed(layer, ids.to(trial.device))
    assert tuple(got.shape) == (len(ids), rows.shape[1]), f"{layer.name}: {list(got.shape)}"
    share = off_weight(trial, got, rows[ids])
    assert share <= 1, f"{layer.name}: a row is off by {share:.3g} times what one rounding explains"


def assert_logits(trial: Trial, layer: VocabEmbedding, matrix: Tensor) -> None:
    """Logits of this rank's vocabulary, padding aside, are products with `matrix` ``[out, in]``."""
    filled = layer.info.parts[0].out.filled
    for tokens in BATCHES:
        x = trial.batch(layer, tokens)
        out = layer.method.logits(layer, x.clone())
        assert tuple(out.shape) == (tokens, layer.info.out_features), f"{layer.name}: logits of shape {list(out.shape)}"
        share = off(trial, out[:, :filled], x, matrix[:filled])
        assert share <= 1, f"{layer.name}: logits are off by {share:.3g} times what rounding explains"


@dataclass(frozen=True)
class Call:
    """Something that a method computes, and inputs for it."""

    layer: Linear | VocabEmbedding
    run: Callable[[Tensor], Tensor]
    #: activations ``[T, in]``, or ids ``[T]``
    given: Tensor
    #: features of the result
    width: int
    is_lookup: bool = False

    @property
    def name(self) -> str:
        """The layer's, for messages."""
        return self.layer.name

    def __call__(self, given: Tensor) -> Tensor:
        """The result ``[T, width]``."""
        return self.run(given)


def calls(trial: Trial, layers: Layers, tokens: int) -> list[Call]:
    """Everything that methods compute."""
    found = [Call(layer, layer, trial.batch(layer, tokens), layer.info.out_features) for layer in layers.linear]
    head, embedding = layers.head, layers.embedding
    found.append(Call(head, partial(head.method.logits, head), trial.batch(head, tokens), head.info.out_features))
    ids = torch.arange(tokens, device=trial.device)
    embed = partial(embedding.method.embed, embedding)
    return [*found, Call(embedding, embed, ids, embedding.info.in_features, is_lookup=True)]


def skipping(trial: Trial, entries: list[str]) -> Trial:
    """The trial with a sample whose skip list has `entries`."""
    sample = trial.case.sample
    assert sample.skip_key is not None
    config: dict[str, Any] = {**sample.config, sample.skip_key: entries}
    return replace(trial, case=replace(trial.case, sample=replace(sample, config=config)))
