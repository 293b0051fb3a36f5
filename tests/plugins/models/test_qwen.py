"""Qwen3 against transformers, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from enginebay.errors import ModelError
from enginebay.interfaces.model import ModelContext
from enginebay.layers.build import ModelBuilder
from enginebay_qwen import enginebay_models, make
from enginebay_qwen.model import layer_windows

IDS = [3, 17, 91, 5, 44, 8, 60, 2, 33]


def config(**changes: Any) -> Any:
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
    return transformers.Qwen3Config(**(fields | changes))


def hf_model(conf: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(conf).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # transformers starts biases at 0 and norms at 1, which would hide them
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    return model


@pytest.fixture
def lab(model_lab: Any) -> Any:
    return model_lab(make)


WINDOWED = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "bias": {"attention_bias": True},
    "windows": WINDOWED,
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
def test_logits_equal_transformers(lab: Any, variant: str, offset: int) -> None:
    """C59, C61."""
    conf = config(**VARIANTS[variant])
    hf = hf_model(conf)
    ours = lab.twin(hf, conf, max_model_len=8300).step({0: IDS}, offset)
    torch.testing.assert_close(ours, lab.reference(hf, IDS, offset), rtol=1e-4, atol=1e-4)


def test_greedy_tokens_equal_transformers_over_windows(lab: Any) -> None:
    conf = config(**WINDOWED)
    hf = hf_model(conf)
    runner = lab.twin(hf, conf)
    logits, tokens = runner.step({1: IDS}), list(IDS)
    for _ in range(12):
        tokens.append(int(logits[-1].argmax()))
        logits = runner.step({1: tokens[-1:]})
    want = hf.generate(torch.tensor([IDS]), max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
    assert tokens == want[0].tolist()


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_together_equal_one(lab: Any, world: int) -> None:
    conf = config(attention_bias=True, **WINDOWED)
    hf = hf_model(conf)
    ranks = lab.ranks(conf, lab.saved(hf), world, {0: IDS})
    assert len(ranks) == world
    for logits in ranks:
        torch.testing.assert_close(logits, lab.reference(hf, IDS), rtol=1e-4, atol=1e-4)


def test_windows_follow_the_configuration() -> None:
    assert layer_windows(config(**WINDOWED)) == (None, None, 3, 3)
    assert layer_windows(config()) == (None,) * 4
    types = ["sliding_attention", "full_attention"] * 2
    assert layer_windows(config(use_sliding_window=True, sliding_window=5, layer_types=types)) == (5, None, 5, None)


def test_use_sliding_window_false_is_honoured_against_layer_types() -> None:
    """C61."""
    conf = config(use_sliding_window=False, sliding_window=5, layer_types=["sliding_attention"] * 4)
    assert layer_windows(conf) == (None,) * 4


def test_a_sliding_layer_without_a_window_is_refused() -> None:
    conf = config(use_sliding_window=True, sliding_window=None, layer_types=["sliding_attention"] * 4)
    with pytest.raises(ModelError, match="sliding_window is not set"):
        layer_windows(conf)


def test_an_unknown_layer_type_is_refused() -> None:
    conf = config()
    conf.layer_types = ["full_attention", "chunked_attention", "full_attention", "full_attention"]
    with pytest.raises(ModelError, match=r"layer_types\[1\] 'chunked_attention'"):
        layer_windows(conf)


def test_as_many_layer_types_as_layers() -> None:
    conf = config()
    conf.layer_types = ["full_attention"] * 3
    build = ModelBuilder(dtype=torch.float32, device="meta", max_model_len=64)
    with pytest.raises(ModelError, match="3 layer types for 4 layers"):
        make(ModelContext(config=conf, build=build))


def test_the_record_names_the_architecture() -> None:
    assert [record.name for record in enginebay_models()] == ["Qwen3ForCausalLM"]
