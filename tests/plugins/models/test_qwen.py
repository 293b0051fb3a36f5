"""Qwen2 and Qwen3 against transformers, in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from enginebay.errors import ModelError, WeightsError
from enginebay.interfaces.model import CausalLM, ModelContext
from enginebay.layers.build import ModelBuilder
from enginebay.layers.decoder import layer_windows
from enginebay.loading.load_model import expected_tensors
from enginebay_qwen import enginebay_models, make_qwen2, make_qwen3

IDS = [3, 17, 91, 5, 44, 8, 60, 2, 33]


@dataclass(frozen=True)
class Family:
    """One architecture, ours beside transformers'."""

    make: Callable[[ModelContext], CausalLM]
    config_class: Any
    hf_class: Any

    def config(self, **changes: Any) -> Any:
        fields: dict[str, Any] = {
            "vocab_size": 100,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 8300,
            "initializer_range": 0.2,
        }
        return self.config_class(**(fields | changes))

    def hf_model(self, conf: Any) -> Any:
        torch.manual_seed(0)
        model = self.hf_class(conf).eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # transformers starts biases at 0 and norms at 1, which would hide them
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
        return model


FAMILIES = {
    "qwen2": Family(make_qwen2, transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": Family(make_qwen3, transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture
def lab(model_lab: Any, family: Family) -> Any:
    return model_lab(family.make)


WINDOWED = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "bias": {"attention_bias": True},  # no field of Qwen2's, which has one on queries, keys and values anyway
    "windows": WINDOWED,
    "mixed_windows": {
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "window_not_used": {**WINDOWED, "use_sliding_window": False},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 2075,
        }
    },
}


@pytest.mark.parametrize("offset", [0, 1000, 8000])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(lab: Any, family: Family, variant: str, offset: int) -> None:
    """C59, C61."""
    conf = family.config(**VARIANTS[variant])
    lab.check_logits(family.hf_model(conf), conf, IDS, offset)


def test_qwen2_without_a_head_size_divides_the_width(model_lab: Any) -> None:
    """Published Qwen2 configurations have no head_dim."""
    family = FAMILIES["qwen2"]
    conf = transformers.Qwen2Config(
        vocab_size=100,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    hf, lab = family.hf_model(conf), model_lab(make_qwen2)
    assert not hasattr(conf, "head_dim")
    torch.testing.assert_close(lab.twin(hf, conf).step({0: IDS}), lab.reference(hf, IDS), rtol=1e-4, atol=1e-4)


def test_greedy_tokens_equal_transformers_over_windows(lab: Any, family: Family) -> None:
    """The prompt in two chunks, then one token a step beside another row's prefill."""
    conf = family.config(**WINDOWED)
    lab.check_greedy(family.hf_model(conf), conf, IDS, beside=True)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_together_equal_one(lab: Any, family: Family, world: int) -> None:
    conf = family.config(attention_bias=True, **WINDOWED)
    lab.check_ranks(family.hf_model(conf), conf, IDS, world)


def test_expected_tensors_are_transformers_state_dict(family: Family) -> None:
    conf = family.config()
    build = ModelBuilder(dtype=torch.float32, device="meta", max_model_len=64)
    names = expected_tensors(family.make(ModelContext(config=conf, build=build)))
    assert names == {name: tuple(tensor.shape) for name, tensor in family.hf_model(conf).state_dict().items()}


def test_a_qwen2_checkpoint_without_its_biases_is_refused(model_lab: Any) -> None:
    """C51."""
    family = FAMILIES["qwen2"]
    conf, lab = family.config(), model_lab(make_qwen2)
    tensors = lab.saved(family.hf_model(conf))
    del tensors["model.layers.3.self_attn.k_proj.bias"]
    with pytest.raises(WeightsError, match=r"1 missing: model\.layers\.3\.self_attn\.k_proj\.bias"):
        lab.load(conf, tensors)


def test_windows_follow_the_configuration(family: Family) -> None:
    config = family.config
    assert layer_windows(config(**WINDOWED)) == (None, None, 3, 3)
    assert layer_windows(config()) == (None,) * 4
    types = ["sliding_attention", "full_attention"] * 2
    assert layer_windows(config(use_sliding_window=True, sliding_window=5, layer_types=types)) == (5, None, 5, None)


def test_use_sliding_window_false_is_honoured_against_layer_types(family: Family) -> None:
    """C61."""
    conf = family.config(use_sliding_window=False, sliding_window=5, layer_types=["sliding_attention"] * 4)
    assert layer_windows(conf) == (None,) * 4


def test_a_sliding_layer_without_a_window_is_refused(family: Family) -> None:
    conf = family.config(use_sliding_window=True, sliding_window=None, layer_types=["sliding_attention"] * 4)
    with pytest.raises(ModelError, match="sliding_window is not set"):
        layer_windows(conf)


def test_an_unknown_layer_type_is_refused(family: Family) -> None:
    conf = family.config()
    conf.layer_types = ["full_attention", "chunked_attention", "full_attention", "full_attention"]
    with pytest.raises(ModelError, match=r"layer_types\[1\] 'chunked_attention'"):
        layer_windows(conf)


def test_as_many_layer_types_as_layers(family: Family) -> None:
    conf = family.config()
    conf.layer_types = ["full_attention"] * 3
    build = ModelBuilder(dtype=torch.float32, device="meta", max_model_len=64)
    with pytest.raises(ModelError, match="3 layer types for 4 layers"):
        family.make(ModelContext(config=conf, build=build))


def test_the_records_name_the_architectures() -> None:
    assert [record.name for record in enginebay_models()] == ["Qwen2ForCausalLM", "Qwen3ForCausalLM"]
