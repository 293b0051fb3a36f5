"""Which tiny models are tried, and what transformers makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from enginebay.conformance.model import samples
from enginebay.conformance.model.samples import DEFAULT, REACHES, Sample
from enginebay.conformance.model.twin import NotTakenError, twin_of
from enginebay.errors import PluginError
from enginebay.loading.hf_config import load_hf_config
from enginebay.loading.open_source import open_source
from enginebay.plugins.records import ModelRecord


def record(name: str, **fields: Any) -> ModelRecord:
    return ModelRecord(name=name, summary="", factory=print, api_version=0, **fields)


def names(found: list[Sample]) -> list[str]:
    return [str(sample) for sample in found]


def test_every_kind_of_layer_is_in_a_tiny_model() -> None:
    config = samples.tiny_config(record("Gemma3ForCausalLM"))
    assert config.layer_types == ["sliding_attention", "full_attention"] * 2
    assert config.sliding_window == samples.WINDOW


def test_optional_windows_are_tried_on_and_off_c61() -> None:
    assert names(samples.plain(record("Qwen3ForCausalLM"))) == ["default", "use_sliding_window"]
    assert names(samples.windowed(record("Qwen3ForCausalLM")))[1:] == ["use_sliding_window off"]
    assert names(samples.plain(record("MistralForCausalLM"))) == ["default"]  # its windows are no option
    assert names(samples.plain(record("LlamaForCausalLM"))) == ["default"]


def test_settings_are_read_off_the_configuration() -> None:
    found = names(samples.settings(record("LlamaForCausalLM")))
    assert {"attention_bias=True", "mlp_bias=True", "hidden_act=gelu", "rms_norm_eps=0.1", "head_dim=32"} <= set(found)
    assert not any(name.startswith(("tie_word", "rope_", "vocab_file", "dtype", "use_cache")) for name in found)
    assert "final_logit_softcapping=2.0" in names(samples.settings(record("Gemma3ForCausalLM")))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_every_rope_type_is_tried_at_every_distance_c59(name: str) -> None:
    found = samples.far(record(name))
    assert len(found) == len(samples.ROPE_TYPES) * len(REACHES)
    assert {max(far.positions) for far in found} == set(REACHES)
    own = [str(far) for far in found if not far.sample.changes]
    assert own == [f"default, {reach}" for reach in REACHES]  # what may not be refused


def test_more_ranks_than_declared_are_not_tried() -> None:
    assert {shared.world for shared in samples.shared(record("LlamaForCausalLM"))} == {2, 4}
    assert {shared.world for shared in samples.shared(record("LlamaForCausalLM", max_tensor_parallel=2))} == {2}
    assert samples.shared(record("LlamaForCausalLM", max_tensor_parallel=1)) == []


def test_a_records_own_configuration_is_taken() -> None:
    from transformers import LlamaConfig

    tiny = LlamaConfig(**{**samples.SIZES, "num_hidden_layers": 2})
    twin = twin_of("LlamaForCausalLM", lambda: tiny, DEFAULT)
    assert len(twin.hf.model.layers) == 2


def test_an_architecture_that_transformers_does_not_know_is_said_to_need_one() -> None:
    with pytest.raises(PluginError, match=r"UnheardOfForCausalLM: .*give the record a tiny_config"):
        samples.plain(record("UnheardOfForCausalLM"))


def test_what_transformers_does_not_take_is_told_apart() -> None:
    with pytest.raises(NotTakenError, match="transformers does not take odd"):
        twin_of("LlamaForCausalLM", None, Sample("odd", {"hidden_act": "no_such_activation"}))


@pytest.mark.parametrize("tied", [True, False])
def test_a_twins_checkpoint_is_what_transformers_saves(tmp_path: Path, tied: bool) -> None:
    twin = twin_of("LlamaForCausalLM", None, Sample(f"tied {tied}", {"tie_word_embeddings": tied}))
    assert (twin.head in twin.tensors) is not tied
    norms = [tensor for name, tensor in twin.tensors.items() if "norm" in name]
    assert norms
    assert all(float(tensor.std()) > 0.1 for tensor in norms)  # a scale of ones would hide whether it is read
    files = twin.write(tmp_path, {twin.embedding: None, "more": torch.ones(3)})
    source = open_source(files)
    assert set(source.names()) == twin.tensors.keys() - {twin.embedding} | {"more"}
    source.close()
    assert load_hf_config(files).architectures == ["LlamaForCausalLM"]
