"""Strict loading: everything consumed, everything filled, or one error with names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from enginebay.errors import ModelError, WeightsError
from enginebay.loading.load_model import expected_tensors, load_weights
from enginebay.loading.name_map import WeightMap
from torch import Tensor

DOWN = "model.layers.1.mlp.down_proj.weight"
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def filled(lab: Any, model: Any, **kwargs: Any) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = lab.checkpoint(expected_tensors(model), **kwargs)
    return tensors


def poisoned(model: Any) -> Any:
    """The model with every parameter at a value that no checkpoint has."""
    for parameter in model.parameters():
        parameter.data.fill_(-77)
    return model


def test_every_parameter_is_filled_and_each_tensor_read_once(lab: Any) -> None:
    """C51."""
    model = poisoned(lab.model())
    source = lab.source(filled(lab, model))
    load_weights(model, source)
    assert source.reads == source.names()
    assert not any((parameter == -77).any() for parameter in model.parameters())
    assert not (model.compute_logits(torch.eye(16)) == -77).any()
    layer = model.layers[1].self_attn.qkv_proj
    tensors = source.tensors
    names = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
    assert torch.equal(layer.dense_weight(), torch.cat([tensors[f"{name}.weight"] for name in names]))
    assert torch.equal(layer.bias, torch.cat([tensors[f"{name}.bias"] for name in names]))
    assert torch.equal(head_values(model), tensors[HEAD])
    assert torch.equal(model.embed_tokens.weight[:70], tensors[EMBED])
    assert not model.embed_tokens.weight[70:].any()  # the vocabulary's padding


def head_values(model: Any) -> Tensor:
    """The head's matrix, wherever it is kept: its logits of unit vectors."""
    values: Tensor = model.compute_logits(torch.eye(16)).T
    return values


def test_a_loaded_model_takes_no_second_checkpoint(lab: Any) -> None:
    model = lab.model()
    source = lab.source(filled(lab, model))
    load_weights(model, source)
    with pytest.raises(ModelError, match="is loaded already; build the model anew"):
        load_weights(model, source)


def test_missing_extra_and_misshapen_are_listed_together_before_data_is_read(lab: Any) -> None:
    """C51, C56."""
    model = lab.model()
    tensors = filled(lab, model)
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    tensors["model.layers.0.mlp.up_proj.weight_scale"] = torch.ones(24)
    tensors[DOWN] = torch.ones(24, 16)
    source = lab.source(tensors)
    with pytest.raises(WeightsError) as caught:
        load_weights(model, source)
    message = str(caught.value)
    assert "1 missing: model.layers.0.self_attn.k_proj.weight" in message
    assert "1 unexpected: model.layers.0.mlp.up_proj.weight_scale" in message
    assert f"1 of another shape: {DOWN} [24, 16] instead of [16, 24]" in message
    assert source.reads == []


def test_dropped_kv_scales_are_refused(lab: Any) -> None:
    """C55."""
    model = lab.model()
    tensors = filled(lab, model) | {"model.layers.0.self_attn.k_scale": torch.ones(())}
    with pytest.raises(WeightsError, match=r"unexpected: model\.layers\.0\.self_attn\.k_scale"):
        load_weights(model, lab.source(tensors))


def test_declared_names_are_ignored(lab: Any) -> None:
    model = lab.model()
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    source = lab.source(filled(lab, model) | {name: torch.ones(2)})
    load_weights(model, source)
    assert name not in source.reads


def test_long_lists_are_cut_with_a_count(lab: Any) -> None:
    model = lab.model()
    extra = {f"extra.{i}": torch.ones(1) for i in range(30)}
    with pytest.raises(WeightsError, match=r"30 unexpected: .*, and 10 more"):
        load_weights(model, lab.source(filled(lab, model) | extra))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_values_do_not_fill_a_plain_layer(lab: Any, dtype: torch.dtype) -> None:
    """C56: without their scales they mean something else."""
    model = lab.model()
    tensors = filled(lab, model)
    tensors[DOWN] = tensors[DOWN].to(dtype)
    with pytest.raises(WeightsError, match=f"{DOWN}: holds {dtype}, but the layer keeps torch.float32"):
        load_weights(model, lab.source(tensors))


def test_half_precision_converts(lab: Any) -> None:
    model = lab.model()
    tensors = {name: tensor.bfloat16() for name, tensor in filled(lab, model).items()}
    load_weights(model, lab.source(tensors))
    assert torch.equal(model.layers[1].mlp.down_proj.dense_weight(), tensors[DOWN].float())


def test_an_encoded_tensor_needs_its_quantizer(lab: Any) -> None:
    model = lab.model()
    source = lab.source(filled(lab, model), negated={DOWN})
    with pytest.raises(WeightsError, match=f"{DOWN} is encoded as 'test:negated', and no quantizer"):
        load_weights(model, source)
    with pytest.raises(WeightsError, match=f"{DOWN}: Int8 does not read the encoding"):
        load_weights(model, source, lab.int8)
    load_weights(model, source, lab.negated)
    assert torch.equal(model.layers[1].mlp.down_proj.dense_weight(), source.tensors[DOWN])


# --- the tied matrix: C52's eight cases, tied or not x head present or not x plain or quantized ----------------------


@pytest.fixture(params=[False, True], ids=["plain", "int8"])
def kind(request: Any, lab: Any) -> Any:
    return lab.int8 if request.param else None


def head_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The embedding's tensors under the head's names."""
    prefix = "model.embed_tokens."
    return {
        f"lm_head.{name.removeprefix(prefix)}": tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def test_c52_tied_and_absent_loads(lab: Any, kind: Any) -> None:
    model = poisoned(lab.model(tied=True, quantizer=kind))
    tensors = filled(lab, model, int8=kind is not None)
    assert not any(name.startswith("lm_head") for name in tensors)
    load_weights(model, lab.source(tensors), kind)
    assert model.lm_head is model.embed_tokens
    hidden = torch.randn(3, 16)
    dense = tensors[EMBED].float() * (tensors["model.embed_tokens.weight_scale"][:, None] if kind else 1)
    torch.testing.assert_close(model.compute_logits(hidden), hidden @ dense.T, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(model.embed(torch.tensor([0, 69])), dense[[0, 69]])


def test_c52_tied_and_present_and_equal_loads(lab: Any, kind: Any) -> None:
    model = lab.model(tied=True, quantizer=kind)
    tensors = filled(lab, model, int8=kind is not None)
    load_weights(model, lab.source(tensors | head_of(tensors)), kind)
    assert torch.equal(model.lm_head.weight[:70], tensors[EMBED])


@pytest.mark.parametrize("change", ["zero", "one_value"])
def test_c52_tied_and_present_but_different_is_refused(lab: Any, kind: Any, change: str) -> None:
    model = lab.model(tied=True, quantizer=kind)
    tensors = filled(lab, model, int8=kind is not None)
    head = head_of(tensors)
    if change == "zero":
        head[HEAD].zero_()
    else:
        head[HEAD][5, 5] += 1
    with pytest.raises(WeightsError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load_weights(model, lab.source(tensors | head), kind)


def test_c52_tied_quantized_with_other_scales_is_refused(lab: Any) -> None:
    model = lab.model(tied=True, quantizer=lab.int8)
    tensors = filled(lab, model, int8=True)
    head = head_of(tensors)
    head["lm_head.weight_scale"][3] += 1
    with pytest.raises(WeightsError, match=r"lm_head\.weight_scale differs"):
        load_weights(model, lab.source(tensors | head), lab.int8)


def test_c52_untied_and_present_loads_both(lab: Any, kind: Any) -> None:
    model = lab.model(quantizer=kind)
    tensors = filled(lab, model, int8=kind is not None)
    load_weights(model, lab.source(tensors), kind)
    assert model.lm_head is not model.embed_tokens
    assert not torch.equal(tensors[HEAD], tensors[EMBED])
    scale = tensors["lm_head.weight_scale"][:, None] if kind else 1
    assert torch.equal(head_values(model), tensors[HEAD] * scale)
    assert torch.equal(model.embed_tokens.weight[:70], tensors[EMBED])


def test_c52_untied_and_absent_is_refused(lab: Any, kind: Any) -> None:
    model = lab.model(quantizer=kind)
    tensors = {n: t for n, t in filled(lab, model, int8=kind is not None).items() if not n.startswith("lm_head")}
    with pytest.raises(WeightsError, match=r"missing: lm_head\.weight"):
        load_weights(model, lab.source(tensors), kind)


@pytest.mark.parametrize("encoded", [{EMBED}, {HEAD}, {EMBED, HEAD}])
def test_c52_tied_matrices_in_other_encodings_are_compared_by_value(lab: Any, encoded: set[str]) -> None:
    model = lab.model(tied=True, quantizer=lab.negated)
    tensors = filled(lab, model)
    both = tensors | head_of(tensors)
    load_weights(model, lab.source(both, negated=encoded), lab.negated)
    both[HEAD] = both[HEAD] + 1
    with pytest.raises(WeightsError, match="differs"):
        load_weights(lab.model(tied=True, quantizer=lab.negated), lab.source(both, negated=encoded), lab.negated)


# --- int8: the second method ------------------------------------------------------------------------------------------


def test_int8_layers_compute_their_dense_weights(lab: Any) -> None:
    """C58: fused parts, bias and scales through nothing but the method's specs."""
    model = lab.model(quantizer=lab.int8)
    tensors = filled(lab, model, int8=True)
    load_weights(model, lab.source(tensors), lab.int8)
    layer, prefix = model.layers[0].self_attn.qkv_proj, "model.layers.0.self_attn."
    dense = torch.cat(
        [
            tensors[f"{prefix}{p}_proj.weight"].float() * tensors[f"{prefix}{p}_proj.weight_scale"][:, None]
            for p in "qkv"
        ]
    )
    bias = torch.cat([tensors[f"{prefix}{p}_proj.bias"] for p in "qkv"])
    x = torch.randn(5, 16)
    torch.testing.assert_close(layer(x), x @ dense.T + bias)
    torch.testing.assert_close(layer.dense_weight(), dense)


@pytest.mark.parametrize("rank", [0, 1])
def test_int8_ranks_hold_their_rows_and_scales(lab: Any, rank: int) -> None:
    """C53's kind: a split layer's scales follow its rows."""
    tensors = filled(lab, lab.model(quantizer=lab.int8), int8=True)
    model = lab.model(quantizer=lab.int8, rank=rank, world=2, comm=SumNothing())
    load_weights(model, lab.source(tensors), lab.int8)
    name = "model.layers.0.mlp.up_proj"
    rows = slice(12 * rank, 12 * rank + 12)
    layer = model.layers[0].mlp.gate_up_proj
    assert torch.equal(layer.weight[12:], tensors[f"{name}.weight"][rows])
    assert torch.equal(layer.weight_scale[12:], tensors[f"{name}.weight_scale"][rows])
    down = model.layers[0].mlp.down_proj
    assert torch.equal(down.weight, tensors["model.layers.0.mlp.down_proj.weight"][:, rows])
    assert torch.equal(down.weight_scale, tensors["model.layers.0.mlp.down_proj.weight_scale"])


class SumNothing:
    """Collectives that no test reaches."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        raise AssertionError

    def all_gather(self, tensor: Tensor) -> Tensor:
        raise AssertionError


# --- the model's own mistakes -----------------------------------------------------------------------------------------


def test_a_parameter_made_past_the_builder_is_named(lab: Any) -> None:
    """C51."""
    model = lab.model()
    model.extra = torch.nn.Linear(2, 2, bias=False)
    with pytest.raises(WeightsError, match=r"no layer of enginebay loads: extra\.weight"):
        expected_tensors(model)


def test_two_layers_of_one_name_are_refused(lab: Any) -> None:
    model = lab.model()
    model.weight_map = WeightMap(renames=(("model.layers.{i}.input_layernorm", "norm"),))
    with pytest.raises(WeightsError, match=r"two layers of the model load norm\.weight"):
        expected_tensors(model)


def test_renames_reach_the_checkpoint(lab: Any) -> None:
    model = lab.model(tied=True)
    model.weight_map = WeightMap(renames=(("model.{rest*}", "text.{rest}"),), tied=(("lm_head", "model.embed_tokens"),))
    tensors = filled(lab, model)
    assert "text.layers.0.mlp.gate_proj.weight" in tensors
    load_weights(model, lab.source(tensors | {HEAD: tensors["text.embed_tokens.weight"].clone()}))
    assert torch.equal(model.embed_tokens.weight[:70], tensors["text.embed_tokens.weight"])
