"""Random weights."""

from __future__ import annotations

import pytest
import torch
from enginebay.errors import WeightsError
from enginebay.loading.dummy_source import DummySource

SHAPES = {
    "model.embed_tokens.weight": (500, 40),
    "model.layers.0.self_attn.q_proj.weight": (40, 40),
    "model.layers.0.self_attn.q_proj.bias": (40,),
    "model.layers.0.self_attn.q_norm.weight": (8,),
    "model.layers.0.input_layernorm.weight": (40,),
    "model.norm.weight": (40,),
}


def source(**kwargs: int | float) -> DummySource:
    return DummySource(SHAPES, dtype=torch.float32, **kwargs)  # type: ignore[arg-type]


def test_names_and_shapes() -> None:
    dummy = source()
    assert dummy.names() == list(SHAPES)
    for name, shape in SHAPES.items():
        raw = dummy.load(name)
        assert dummy.shape(name) == raw.shape == tuple(raw.data.shape) == shape
        assert (raw.encoding, raw.data.dtype) == (None, torch.float32)


def test_matrices_are_normal_norms_one_biases_zero() -> None:
    dummy = source(std=0.5)
    matrix = dummy.load("model.embed_tokens.weight").data
    assert abs(matrix.mean().item()) < 0.02
    assert matrix.std().item() == pytest.approx(0.5, rel=0.05)
    assert all((dummy.load(name).data == 1).all() for name in SHAPES if "norm" in name)
    assert (dummy.load("model.layers.0.self_attn.q_proj.bias").data == 0).all()


def test_equal_seeds_give_equal_weights_in_any_order() -> None:
    first, second = source(seed=3), source(seed=3)
    drawn = {name: first.load(name).data for name in SHAPES}
    for name in reversed(SHAPES):
        assert torch.equal(second.load(name).data, drawn[name])


def test_seeds_and_names_give_different_weights() -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(source(seed=1).load(name).data, source(seed=2).load(name).data)
    twins = DummySource({"a": (4, 4), "b": (4, 4)}, dtype=torch.float32)
    assert not torch.equal(twins.load("a").data, twins.load("b").data)


def test_a_function_of_shapes_is_asked_once_and_late() -> None:
    calls: list[int] = []

    def shapes() -> dict[str, tuple[int, ...]]:
        calls.append(1)
        return {"a": (2, 2)}

    dummy = DummySource(shapes, dtype=torch.bfloat16)
    assert calls == []
    assert dummy.names() == ["a"]
    assert dummy.load("a").data.dtype == torch.bfloat16
    assert calls == [1]


def test_unknown_name() -> None:
    with pytest.raises(WeightsError, match="no shape is given for surprise"):
        source().load("surprise")
