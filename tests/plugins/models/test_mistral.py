"""Mistral against transformers, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from enginebay.errors import ModelError
from enginebay.interfaces.model import ModelContext
from enginebay.layers.build import ModelBuilder
from enginebay.loading.load_model import expected_tensors
from enginebay_mistral import enginebay_models, make

IDS = [3, 17, 91, 5, 44, 8, 60, 2, 33]


def config(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8300,
        "sliding_window": 3,
        "initializer_range": 0.2,
    }
    return transformers.MistralConfig(**(fields | changes))


def hf_model(conf: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(conf).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms of 1 would hide whether they are read
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    return model


@pytest.fixture
def lab(model_lab: Any) -> Any:
    return model_lab(make)


VARIANTS: dict[str, dict[str, Any]] = {
    "window": {},
    "no_window": {"sliding_window": None},
    "tied": {"tie_word_embeddings": True},
    "head_dim": {"head_dim": 16},
    "multi_head": {"num_key_value_heads": 4},
}


@pytest.mark.parametrize("offset", [0, 1000, 8000])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(lab: Any, variant: str, offset: int) -> None:
    """C59."""
    conf = config(**VARIANTS[variant])
    lab.check_logits(hf_model(conf), conf, IDS, offset)


def test_greedy_tokens_equal_transformers_over_the_window(lab: Any) -> None:
    """The prompt in two chunks, the second beginning inside the first's window."""
    conf = config()
    lab.check_greedy(hf_model(conf), conf, IDS, beside=False)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_together_equal_one(lab: Any, world: int) -> None:
    conf = config()
    lab.check_ranks(hf_model(conf), conf, IDS, world)


@pytest.mark.parametrize("window", [None, 3])
def test_every_layer_has_the_window(window: int | None) -> None:
    build = ModelBuilder(dtype=torch.bfloat16, device="meta", max_model_len=64)
    model = make(ModelContext(config=config(sliding_window=window), build=build))
    assert [layer.spec.window for layer in model.attention_layers] == [window] * 3


def test_expected_tensors_are_transformers_state_dict() -> None:
    conf = config()
    build = ModelBuilder(dtype=torch.float32, device="meta", max_model_len=64)
    names = expected_tensors(make(ModelContext(config=conf, build=build)))
    assert names == {name: tuple(tensor.shape) for name, tensor in hf_model(conf).state_dict().items()}


def test_mixed_layers_are_refused() -> None:
    conf = config()
    conf.layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    build = ModelBuilder(dtype=torch.float32, device="meta", max_model_len=64)
    with pytest.raises(ModelError, match="layer_types with other than sliding_attention"):
        make(ModelContext(config=conf, build=build))


def test_the_record_names_the_architecture() -> None:
    assert [record.name for record in enginebay_models()] == ["MistralForCausalLM"]
