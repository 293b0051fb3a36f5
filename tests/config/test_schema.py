"""`EngineConfig`: what the tree holds, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from enginebay.config import (
    AttentionConfig,
    EngineConfig,
    GroupBackends,
    ParallelConfig,
    PhaseBackends,
    PhaseOverrides,
    SchedulerConfig,
    load_config,
)
from enginebay.errors import ConfigError
from enginebay.plugins.requirements import CacheKind
from pydantic import BaseModel, ValidationError


def models(model: type[BaseModel] = EngineConfig) -> Iterator[type[BaseModel]]:
    """Every model of the tree that has a default instance."""
    yield model
    for field in model.model_fields.values():
        if isinstance(field.default, BaseModel):
            yield from models(type(field.default))


@pytest.mark.parametrize("model", [*models(), PhaseBackends, GroupBackends, PhaseOverrides], ids=lambda m: m.__name__)
def test_every_field_is_described(model: type[BaseModel]) -> None:
    assert model.__doc__
    assert [name for name, field in model.model_fields.items() if not field.description] == []


@pytest.mark.parametrize("model", [*models(), PhaseBackends, GroupBackends, PhaseOverrides], ids=lambda m: m.__name__)
def test_every_section_is_frozen_strict_and_closed(model: type[BaseModel]) -> None:
    assert (model.model_config["frozen"], model.model_config["strict"], model.model_config["extra"]) == (
        True,
        True,
        "forbid",
    )


def test_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        EngineConfig().dtype = "float32"


def test_defaults() -> None:
    config = EngineConfig()
    assert config.model == "smollm2-135m-instruct"
    assert config.attention.backend == config.executor.backend == config.scheduler.policy == config.quant == "auto"
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (256, "auto")
    assert config.graphs.decode_sizes == ()


@pytest.mark.parametrize(
    ("backend", "choices"),
    [
        ("torch", {("full", "decode"): ("torch", ""), ("sliding", "prefill"): ("torch", "")}),
        ({"decode": "b"}, {("full", "decode"): ("b", ".decode"), ("full", "prefill"): ("auto", ".prefill")}),
        (
            {"decode": "b", "groups": {"sliding": "c"}},
            {
                ("full", "decode"): ("b", ".decode"),
                ("sliding", "decode"): ("c", ".groups.sliding"),
                ("sliding", "prefill"): ("c", ".groups.sliding"),
            },
        ),
        (
            {"decode": "b", "groups": {"sliding": {"prefill": "c"}, "full": "auto"}},
            {
                ("full", "decode"): ("auto", ".groups.full"),
                ("sliding", "decode"): ("b", ".decode"),
                ("sliding", "prefill"): ("c", ".groups.sliding.prefill"),
            },
        ),
    ],
)
def test_every_phase_of_every_group_has_a_choice_and_its_place(
    backend: Any, choices: dict[tuple[str, str], tuple[str, str]]
) -> None:
    config = load_config(None, {"attention": {"backend": backend}}, env={}).config.attention
    assert {part: config.choice(*part) for part in choices} == {
        part: (name, f"attention.backend{path}") for part, (name, path) in choices.items()
    }


def test_groups_with_a_choice_of_their_own() -> None:
    assert AttentionConfig().groups == ()
    assert AttentionConfig(backend=PhaseBackends(groups=GroupBackends(sliding="torch"))).groups == ("sliding",)


def test_every_kind_of_cache_has_a_group() -> None:
    assert set(GroupBackends.model_fields) == set(get_args(CacheKind))


def test_world_size() -> None:
    assert ParallelConfig(tensor=2, pipeline=3).world_size == 6


def test_a_step_may_hold_fewer_tokens_than_requests() -> None:
    assert SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=1).max_num_batched_tokens == 1


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("scheduler.max_num_seqs", 0, "expected an integer of at least 1, got 0"),
        ("scheduler.max_num_seqs", True, "expected an integer of at least 1, got true"),
        ("scheduler.max_num_seqs", "8", 'expected an integer of at least 1, got the text "8"'),
        ("scheduler.max_num_seqs", 8.0, "expected an integer of at least 1, got 8.0"),
        ("scheduler.max_num_batched_tokens", 0, 'expected "auto" or an integer of at least 1, got 0'),
        ("scheduler.chunked_prefill", "false", 'expected true or false, got the text "false"'),
        ("scheduler.async_scheduling", 0, "expected true or false, got 0"),
        ("max_model_len", "8k", 'expected "auto" or an integer of at least 1, got the text "8k"'),
        ("dtype", "fp16", 'expected one of "auto", "float32", "bfloat16", "float16", got the text "fp16"'),
        ("cache.gpu_memory_utilization", 0, "expected a number above 0 and at most 1, got 0"),
        ("cache.gpu_memory_utilization", 1.01, "expected a number above 0 and at most 1, got 1.01"),
        ("cache.gpu_memory_utilization", float("nan"), "expected a number above 0 and at most 1, got NaN"),
        ("graphs.decode_sizes", 4, "expected a list (each of them an integer of at least 1), got 4"),
        ("seed", -1, "expected an integer of at least 0"),
        ("compile", "inductor", 'expected "none", got the text "inductor"'),
        ("quant", "fp8", 'expected "auto" or a mapping with the keys method, options, got the text "fp8"'),
        ("model", "", "expected a text, got an empty one"),
        ("parallel", 2, "expected a mapping with the keys tensor, pipeline, got 2"),
        ("scheduler.max_prefill_tokens", 0, 'expected "auto" or an integer of at least 1, got 0'),
        ("sampler.logprobs_mode", "raw", 'expected one of "raw_logprobs", "raw_logits", "processed_logprobs", "proc'),
    ],
)
def test_a_wrong_value_is_refused_with_what_would_be_right(path: str, value: Any, message: str) -> None:
    """C6: what is not supported is refused by name, with what would be."""
    overrides: Any = value
    for key in reversed(path.split(".")):
        overrides = {key: overrides}
    with pytest.raises(ConfigError) as error:
        load_config(None, overrides, env={})
    assert str(error.value).startswith(f"{path} (Python argument): {message}")


def test_an_item_of_a_list_is_named_by_its_index() -> None:
    with pytest.raises(ConfigError, match=r"graphs\.decode_sizes\.1 \(Python argument\): expected an integer"):
        load_config(None, {"graphs": {"decode_sizes": [1, "2"]}}, env={})


def test_quant_needs_a_method() -> None:
    with pytest.raises(ConfigError, match=r"quant\.method \(Python argument\): missing; expected a text"):
        load_config(None, {"quant": {"options": {"bits": 4}}}, env={})


def test_a_groups_backends_are_a_name_or_a_mapping() -> None:
    with pytest.raises(ConfigError, match=r"expected a text or a mapping with the keys prefill, decode or null, got 3"):
        load_config(None, {"attention": {"backend": {"groups": {"sliding": 3}}}}, env={})
