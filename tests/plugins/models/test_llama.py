"""Llama against transformers, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from enginebay.errors import ModelError
from enginebay.interfaces.model import ModelContext
from enginebay.layers.build import ModelBuilder
from enginebay.loading.load_model import expected_tensors
from enginebay_llama import enginebay_models, make

IDS = [3, 17, 91, 5, 44, 8, 60]


def config(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8200,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.2,
    }
    return transformers.LlamaConfig(**(fields | changes))


def hf_model(conf: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(conf).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # transformers starts biases at 0 and norms at 1, which would hide them
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    return model


@pytest.fixture
def lab(model_lab: Any) -> Any:
    return model_lab(make)


VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "head_dim": {"head_dim": 16},
    "multi_head": {"num_key_value_heads": 6},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "exact_gelu": {"hidden_act": "gelu"},
    "vocab_of_64s": {"vocab_size": 128},
    "llama3_rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


@pytest.mark.parametrize("offset", [0, 1000, 8000])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(lab: Any, variant: str, offset: int) -> None:
    """C59: also far from position 0."""
    conf = config(**VARIANTS[variant])
    lab.check_logits(hf_model(conf), conf, IDS, offset, max_model_len=8200)


def test_chunks_and_decode_beside_a_prefill_equal_one_pass(lab: Any) -> None:
    conf = config()
    hf = hf_model(conf)
    runner = lab.twin(hf, conf)
    want = lab.reference(hf, IDS)
    other = list(reversed(IDS))
    first = runner.step({0: IDS[:3]})
    mixed = runner.step({0: IDS[3:4], 1: other})  # row 0 decodes while row 1 prefills
    last = runner.step({0: IDS[4:]})
    got = torch.cat((first, mixed[:1], last))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mixed[1:], lab.reference(hf, other), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("world", "heads", "kv_heads"),
    [(2, 8, 4), (4, 8, 4), (4, 8, 2), (4, 4, 1)],
    ids=["split", "one_each", "shared_by_two", "shared_by_all"],
)
@pytest.mark.parametrize("tied", [False, True])
def test_ranks_together_equal_one(lab: Any, world: int, heads: int, kv_heads: int, tied: bool) -> None:
    conf = config(
        hidden_size=64,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=tied,
        vocab_size=300,
    )
    lab.check_ranks(hf_model(conf), conf, IDS, world)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 1}, "number of heads is 3"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, "3 KV heads"),
        ({"intermediate_size": 81}, "width is 81"),
    ],
)
def test_sizes_that_ranks_cannot_share_are_refused_by_name(changes: dict[str, Any], match: str) -> None:
    build = ModelBuilder(dtype=torch.float32, device="meta", max_model_len=64, world=2, rank=0, comm=UnusedComm())
    with pytest.raises(ModelError, match=match):
        make(ModelContext(config=config(**changes), build=build))


class UnusedComm:
    """Collectives that no test reaches."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError


def test_pipeline_cut_equals_the_whole(lab: Any) -> None:
    conf = config()
    lab.check_pipeline_cut(hf_model(conf), conf, IDS, 2)


def test_meta_build_yields_the_attention_specs_and_takes_no_memory() -> None:
    build = ModelBuilder(dtype=torch.bfloat16, device="meta", max_model_len=8000)
    model = make(ModelContext(config=config(num_hidden_layers=2), build=build))
    assert [layer.index for layer in model.attention_layers] == [0, 1]
    spec = model.attention_layers[0].spec
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.window) == (6, 2, 8, None)
    assert spec.scale == pytest.approx(8**-0.5)
    tensors = [*model.parameters(), *model.buffers()]
    assert tensors
    assert all(tensor.is_meta for tensor in tensors)


def test_expected_tensors_are_transformers_state_dict() -> None:
    conf = config(attention_bias=True, mlp_bias=True)
    build = ModelBuilder(dtype=torch.float32, device="meta", max_model_len=64)
    names = expected_tensors(make(ModelContext(config=conf, build=build)))
    assert names == {name: tuple(tensor.shape) for name, tensor in hf_model(conf).state_dict().items()}


def test_an_unknown_activation_is_refused() -> None:
    build = ModelBuilder(dtype=torch.float32, device="meta", max_model_len=64)
    with pytest.raises(ModelError, match="hidden_act 'relu'"):
        make(ModelContext(config=config(hidden_act="relu"), build=build))


def test_the_record_names_the_architecture() -> None:
    assert [record.name for record in enginebay_models()] == ["LlamaForCausalLM"]
