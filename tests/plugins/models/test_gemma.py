"""Gemma 3 against transformers, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from enginebay.errors import ModelError, WeightsError
from enginebay.interfaces.model import ModelContext
from enginebay.layers.build import ModelBuilder
from enginebay.loading.load_model import expected_tensors
from enginebay_gemma import enginebay_models, make

IDS = [3, 17, 91, 5, 44, 8, 60, 2, 33]
SLIDING, FULL = "sliding_attention", "full_attention"


def config(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
        "sliding_window": 3,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
        "max_position_embeddings": 8300,
        "initializer_range": 0.2,
    }
    return transformers.Gemma3TextConfig(**(fields | changes))


def hf_model(conf: Any, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM._from_config(conf, **changes).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # transformers starts norms and biases at 0, which would hide them
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def lab(model_lab: Any) -> Any:
    return model_lab(make)


VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "bias": {"attention_bias": True},
    "one_kv_head": {"num_key_value_heads": 1},
    "exact_gelu": {"hidden_activation": "gelu"},
    "all_full": {"layer_types": [FULL] * 4},
    "all_sliding": {"layer_types": [SLIDING] * 4},
    "logit_cap": {"final_logit_softcapping": 2.0},
    "own_rope": {
        "rope_parameters": {
            FULL: {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        }
    },
}


@pytest.mark.parametrize("offset", [0, 1000, 8000])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(lab: Any, variant: str, offset: int) -> None:
    """C59."""
    conf = config(**VARIANTS[variant])
    lab.check_logits(hf_model(conf), conf, IDS, offset)


def test_a_capped_attention_equals_transformers_capped(lab: Any) -> None:
    """transformers' Gemma 3 does not hand the field on by itself, but its attention takes the cap."""
    conf = config(attn_logit_softcapping=1.5)
    hf = hf_model(conf, attn_implementation="eager")
    with torch.no_grad():
        want = hf(torch.tensor([IDS]), softcap=1.5).logits[0]
    assert not torch.allclose(want, lab.reference(hf, IDS), atol=1e-2)
    torch.testing.assert_close(lab.twin(hf, conf).step({0: IDS}), want, rtol=1e-4, atol=1e-4)


def test_greedy_tokens_equal_transformers_over_windows(lab: Any) -> None:
    """The prompt in two chunks, then one token a step beside another row's prefill."""
    conf = config()
    lab.check_greedy(hf_model(conf), conf, IDS, beside=True)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_ranks_together_equal_one(lab: Any, world: int, tied: bool) -> None:
    conf = config(tie_word_embeddings=tied, final_logit_softcapping=20.0)
    lab.check_ranks(hf_model(conf), conf, IDS, world)


def test_pipeline_cut_equals_the_whole(lab: Any) -> None:
    conf = config()
    lab.check_pipeline_cut(hf_model(conf), conf, IDS, 2)


def test_embeddings_are_scaled_by_a_rounded_root_as_in_transformers() -> None:
    """The root of 640 is 25.298 in float32 and 25.25 in bfloat16."""
    conf = config(hidden_size=640, num_hidden_layers=1, layer_types=[FULL])
    build = ModelBuilder(dtype=torch.bfloat16, device="cpu", max_model_len=64)
    model: Any = make(ModelContext(config=conf, build=build))
    theirs = transformers.Gemma3ForCausalLM(conf).bfloat16().model.embed_tokens
    model.embed_tokens.get_parameter("weight").data[:100] = theirs.weight.data
    ids = torch.tensor(IDS)
    assert torch.equal(model.embed(ids), theirs(ids))


def test_layers_of_a_type_share_spec_and_table() -> None:
    build = ModelBuilder(dtype=torch.bfloat16, device="meta", max_model_len=64)
    model = make(ModelContext(config=config(), build=build))
    specs = [layer.spec for layer in model.attention_layers]
    assert [spec.window for spec in specs] == [3, 3, None, 3]
    assert {spec.scale for spec in specs} == {20**-0.5}
    assert {spec.head_dim for spec in specs} == {16}
    sliding, second, full, _ = (layer.rope for layer in model.attention_layers)
    assert sliding is second
    assert sliding is not full
    tensors = [*model.parameters(), *model.buffers()]
    assert all(tensor.is_meta for tensor in tensors)


def test_expected_tensors_are_transformers_state_dict() -> None:
    conf = config(tie_word_embeddings=False, attention_bias=True)
    build = ModelBuilder(dtype=torch.float32, device="meta", max_model_len=64)
    names = expected_tensors(make(ModelContext(config=conf, build=build)))
    assert names == {name: tuple(tensor.shape) for name, tensor in hf_model(conf).state_dict().items()}


@pytest.mark.parametrize("change", ["missing", "extra"])
def test_a_checkpoint_that_differs_is_refused_by_name(lab: Any, change: str) -> None:
    """C51."""
    conf = config()
    tensors = lab.saved(hf_model(conf))
    name = "model.layers.1.post_feedforward_layernorm.weight"
    if change == "missing":
        del tensors[name]
    else:
        name = "model.layers.4.post_feedforward_layernorm.weight"
        tensors[name] = torch.zeros(48)
    with pytest.raises(WeightsError, match=f"1 {'missing' if change == 'missing' else 'unexpected'}: {name}"):
        lab.load(conf, tensors)


@pytest.mark.parametrize("saved", ["absent", "equal", "different"])
def test_a_tied_head_may_be_saved_if_it_is_the_same(lab: Any, saved: str) -> None:
    """C52."""
    conf = config()
    tensors = lab.saved(hf_model(conf))
    if saved != "absent":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + float(saved == "different")
    if saved == "different":
        with pytest.raises(WeightsError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
            lab.load(conf, tensors)
    else:
        model = lab.load(conf, tensors)
        assert model.lm_head is model.embed_tokens


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported"),
        ({"sliding_window": None}, "sliding_window is not set"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], match: str) -> None:
    build = ModelBuilder(dtype=torch.float32, device="meta", max_model_len=64)
    with pytest.raises(ModelError, match=match):
        make(ModelContext(config=config(**changes), build=build))


def test_the_record_names_the_architecture() -> None:
    assert [record.name for record in enginebay_models()] == ["Gemma3ForCausalLM"]
