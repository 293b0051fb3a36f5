from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from enginebay.errors import PluginError
from enginebay.plugins.records import (
    AttentionRecord,
    ExecutorRecord,
    ModelRecord,
    QuantRecord,
    SchedulerRecord,
    importable,
)
from enginebay.plugins.requirements import AttentionSpec, Hardware, Reason, Requirements, Support


def attention(**fields: Any) -> AttentionRecord:
    base: dict[str, Any] = {
        "name": "a",
        "summary": "s",
        "factory": print,
        "api_version": 0,
        "dtypes": ("float32",),
        "kv_dtypes": ("float32",),
    }
    return AttentionRecord(**{**base, **fields})


def codes(support: Support) -> list[str]:
    assert support.ok is not bool(support.reasons)
    return [reason.code for reason in support.reasons]


def with_spec(requirements: Requirements, **fields: Any) -> Requirements:
    return replace(requirements, attention=(replace(requirements.attention[0], **fields),))


def cuda(requirements: Requirements, capability: tuple[int, int]) -> Requirements:
    return replace(requirements, hardware=Hardware(device="cuda", capability=capability))


def test_fits(requirements: Requirements) -> None:
    assert codes(attention().supports(requirements)) == []


@pytest.mark.parametrize(
    ("fields", "spec", "code"),
    [
        ({}, {"window": 128}, "window"),
        ({}, {"soft_cap": 50.0}, "soft_cap"),
        ({}, {"sinks": True}, "sinks"),
        ({"head_dims": (64,)}, {"head_dim": 80}, "head_dim"),
    ],
)
def test_undeclared_layer_features_are_refused_c17(
    requirements: Requirements, fields: dict[str, Any], spec: dict[str, Any], code: str
) -> None:
    assert codes(attention(**fields).supports(with_spec(requirements, **spec))) == [code]
    declared = {"window": True, "soft_cap": True, "sinks": True, "head_dims": (64, 80)}
    assert codes(attention(**declared).supports(with_spec(requirements, **spec))) == []


@pytest.mark.parametrize(
    ("fields", "change", "code"),
    [
        ({}, {"dtype": "bfloat16"}, "dtype"),
        ({}, {"kv_dtype": "fp8"}, "kv_dtype"),
        ({"kernel_blocks": (32, 48)}, {"block_size": 16}, "block_size"),
        ({"phases": ("decode",)}, {}, "phase"),
        ({}, {"graphs": True}, "graphs"),
        ({"devices": ("cuda",)}, {}, "device"),
        ({"requires": ("no_such_module_here",)}, {}, "missing_module"),
    ],
)
def test_what_a_record_does_not_declare_is_refused(
    requirements: Requirements, fields: dict[str, Any], change: dict[str, Any], code: str
) -> None:
    assert codes(attention(**fields).supports(replace(requirements, **change))) == [code]


def test_capability_is_compared_as_a_pair(requirements: Requirements) -> None:
    record = attention(min_capability=(8, 9))
    assert codes(record.supports(cuda(requirements, (8, 0)))) == ["capability"]
    assert codes(record.supports(cuda(requirements, (9, 0)))) == []
    assert codes(record.supports(cuda(requirements, (10, 0)))) == []


def deny(requirements: Requirements, **fields: Any) -> str:
    (reason,) = attention(**fields).supports(requirements).reasons
    return str(reason)


def test_every_refusal_gives_the_numbers_c17(requirements: Requirements) -> None:
    """What was wanted, what the backend takes, and what to set where the configuration can help."""
    hopper_only = {"min_capability": (9, 0), "devices": ("cuda",)}
    said = [
        deny(with_spec(requirements, head_dim=80), head_dims=(64, 128)),
        deny(with_spec(requirements, window=128)),
        deny(with_spec(requirements, soft_cap=50.0)),
        deny(with_spec(requirements, sinks=True)),
        deny(replace(requirements, block_size=24), kernel_blocks=(16, 64)),
        deny(replace(requirements, kv_dtype="float8_e4m3fn"), kv_dtypes=("float32", "bfloat16")),
        deny(cuda(requirements, (7, 5)), **hopper_only),
        deny(requirements, devices=("cuda",)),
        deny(requirements, requires=("no_such_module_here",), install="'enginebay[it]'"),
        deny(requirements, requires_dist=("no-such-distribution>=2",), install="'enginebay[it]'"),
        deny(requirements, requires_dist=("pytest>=900",)),
    ]
    assert said == [
        "head_dim: wanted 80, allowed 64, 128",
        "window: wanted sliding window 128, allowed full attention "
        "(name another backend for attention.backend.groups.sliding)",
        "soft_cap: wanted logit soft cap 50.0, allowed no soft cap",
        "sinks: wanted attention sinks, allowed no sinks",
        "block_size: wanted 24, allowed multiples of 16 or of 64 (set cache.block_size)",
        "kv_dtype: wanted float8_e4m3fn, allowed float32, bfloat16 (set cache.dtype)",
        "capability: wanted sm_75, allowed >= sm_90",
        "device: wanted cpu, allowed cuda",
        "missing_module: wanted no_such_module_here, allowed installed modules (pip install 'enginebay[it]')",
        "distribution: no-such-distribution is not installed, needed is no-such-distribution >=2 "
        "(pip install 'enginebay[it]')",
        f"distribution: pytest {pytest.__version__} is installed, needed is pytest >=900 (pip install 'pytest>=900')",
    ]


def test_a_priority_is_the_mean_of_the_phases_asked_for(requirements: Requirements) -> None:
    record = attention(priority=15, phase_priority={"prefill": 30})
    assert record.phase_priorities() == {"decode": 15, "prefill": 30}
    assert record.priority_for(requirements) == 22.5
    assert record.priority_for(replace(requirements, phases=("decode",))) == 15
    assert record.priority_for(replace(requirements, phases=("prefill",))) == 30


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        (
            {"phase_priority": {"prefil": 3}},
            r"plugin a: phase_priority: 'prefil' is not a phase.*Did you mean 'prefill'",
        ),
        ({"requires_dist": ("triton>>3",)}, r"plugin a: requires_dist: 'triton>>3' is not a requirement such as"),
    ],
)
def test_a_record_that_cannot_be_read_is_refused_when_it_is_made(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(PluginError, match=fault):
        attention(**fields)


def test_all_reasons_come_at_once_and_each_once(requirements: Requirements) -> None:
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=80, scale=0.1, window=8)
    many = replace(requirements, dtype="float16", attention=(spec, replace(spec, num_heads=8)))
    assert codes(attention(head_dims=(64,)).supports(many)) == ["dtype", "head_dim", "window"]


def test_a_records_own_check_adds_reasons(requirements: Requirements) -> None:
    record = attention(check=lambda req: [Reason(code="mood", detail=f"not for {req.architecture}")])
    (reason,) = record.supports(requirements).reasons
    assert str(reason) == "mood: not for LlamaForCausalLM"


def test_reason_reads_as_a_sentence() -> None:
    assert str(Reason(code="x", wanted="a", allowed="b", hint="c")) == "x: wanted a, allowed b (c)"


def test_executor_refuses_more_ranks_than_it_has(requirements: Requirements) -> None:
    record = ExecutorRecord(name="e", summary="s", factory=print, api_version=0, max_world_size=1)
    assert codes(record.supports(requirements)) == []
    assert codes(record.supports(replace(requirements, tensor_parallel=2))) == ["world_size"]
    assert codes(record.supports(replace(requirements, pipeline_parallel=2))) == ["world_size"]


def test_model_refuses_more_ranks_than_it_declares(requirements: Requirements) -> None:
    record = ModelRecord(name="LlamaForCausalLM", summary="s", factory=print, api_version=0, max_tensor_parallel=2)
    assert codes(record.supports(replace(requirements, tensor_parallel=2))) == []
    assert codes(record.supports(replace(requirements, tensor_parallel=3))) == ["tensor_parallel"]


def test_quant_refuses_other_methods_and_dtypes(requirements: Requirements) -> None:
    record = QuantRecord(
        name="q", summary="s", factory=print, api_version=0, checkpoint_methods=("q4",), dtypes=("bfloat16",)
    )
    assert codes(record.supports(replace(requirements, quant_method="q4", dtype="bfloat16"))) == []
    assert codes(record.supports(requirements)) == ["quant_method", "dtype"]


def test_a_record_is_frozen_and_new_fields_have_defaults_c16() -> None:
    record = SchedulerRecord(name="s", summary="s", factory=print, api_version=0)
    with pytest.raises(FrozenInstanceError):
        record.name = "t"  # type: ignore[misc]


def test_importable_answers_for_absent_parents_too() -> None:
    assert importable("json")
    assert not importable("no_such_module_here")
    assert not importable("no_such_module_here.part")
