"""Assembly: what a configuration becomes on this machine, over a random model of two layers on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from enginebay.config import load_config
from enginebay.engine import explanation
from enginebay.engine.assembly import build_engine
from enginebay.engine.explanation import Explanation, attention_backends, explain
from enginebay.errors import ConfigError, MemoryBudgetError
from enginebay.plugins.requirements import Hardware
from enginebay.plugins.selection import switched_off
from enginebay.worker.memory import KVBudget
from enginebay.worker.worker import DeviceWorker

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
}


def loaded(folder: Path, **tree: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    base = {"model": str(folder), "load_format": "dummy", "dtype": "float32", "device": "cpu"}
    return load_config(None, {**base, **tree})


def explained(folder: Path, **tree: Any) -> Explanation:
    return explain(loaded(folder, **tree))


def test_every_bay_is_filled_and_auto_values_say_why(tmp_path: Path) -> None:
    made = explained(tmp_path)
    assert (made.resolved.max_model_len, made.resolved.max_num_batched_tokens) == (256, 2048)
    assert {"device", "max_model_len", "max_num_batched_tokens", "kv_dtype", "block_size"} <= made.resolved.why.keys()
    assert made.executor.chosen is not None
    assert made.scheduler.chosen is not None


def test_a_step_holds_the_longest_prompt_where_chunking_is_off(tmp_path: Path) -> None:
    folder = {**CONFIG, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(folder))
    tree = {"model": str(tmp_path), "load_format": "dummy", "device": "cpu", "scheduler": {"chunked_prefill": False}}
    assert explain(load_config(None, tree)).resolved.max_num_batched_tokens == 4096


def test_async_scheduling_off_is_one_step_in_flight(tmp_path: Path) -> None:
    assert explained(tmp_path).max_concurrent_batches == 2
    assert explained(tmp_path, scheduler={"async_scheduling": False}).max_concurrent_batches == 1


def test_a_scheduler_without_it_switches_async_scheduling_off(tmp_path: Path) -> None:
    """C14: and the report says so."""
    file = tmp_path / "one_step.py"
    file.write_text(
        "from enginebay import hookimpl\n"
        "from enginebay.plugins.records import SchedulerRecord\n"
        "@hookimpl\n"
        "def enginebay_schedulers():\n"
        "    return [SchedulerRecord(name='one_step', summary='.', factory=print, api_version=0, async_scheduling=False)]\n"
    )
    made = explained(tmp_path, plugins=[str(file)], scheduler={"policy": "one_step"})
    assert [s.feature for s in switched_off(made.selections)] == ["asynchronous scheduling"]
    assert made.max_concurrent_batches == 1


H200 = Hardware(device="cuda", capability=(9, 0))


def on(hardware: Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanation, "detect", lambda device: hardware)


def test_a_graph_of_more_rows_than_a_step_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on(H200, monkeypatch)
    tree: dict[str, Any] = {"attention": {"backend": "torch"}, "scheduler": {"max_num_seqs": 8}}
    explained(tmp_path, graphs={"decode_sizes": [1, 8]}, **tree)
    with pytest.raises(ConfigError, match=r"graphs\.decode_sizes .* 16 rows, but scheduler\.max_num_seqs is 8"):
        explained(tmp_path, graphs={"decode_sizes": [1, 16]}, **tree)


def test_an_fp8_cache_needs_a_gpu_that_has_such_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree: dict[str, Any] = {"attention": {"backend": "torch"}, "cache": {"dtype": "fp8"}}
    on(H200, monkeypatch)
    explained(tmp_path, **tree)
    on(Hardware(device="cuda", capability=(8, 6)), monkeypatch)
    with pytest.raises(
        ConfigError, match=r"cache\.dtype .*sm_89 or later, and this one is sm_86; set cache\.dtype: auto"
    ):
        explained(tmp_path, **tree)


def test_graphs_on_cpu_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"graphs\.decode_sizes"):
        explained(tmp_path, graphs={"decode_sizes": [1]})


def test_fp8_is_a_word_for_the_cache_alone(tmp_path: Path) -> None:
    made = explained(tmp_path, cache={"dtype": "fp8", "key_scale": 0.5})
    assert (made.resolved.dtype, made.resolved.kv_dtype) == ("float32", "float8_e4m3fn")
    with pytest.raises(ConfigError, match="dtype"):
        explained(tmp_path, dtype="fp8")


@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
def test_scales_without_an_fp8_cache_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"cache\.{name} .*set cache\.dtype: fp8"):
        explained(tmp_path, cache={name: 0.5})


@pytest.mark.parametrize(("blocks", "length"), [(4, 64), (16, 256), (99, 256)])
def test_c7_the_length_is_what_the_pool_holds(tmp_path: Path, blocks: int, length: int) -> None:
    core, tokenizer = build_engine(loaded(tmp_path, cache={"num_blocks": blocks}))
    try:
        assert tokenizer is None
        assert core.info.max_model_len == length
        assert core.stats().num_free_blocks == blocks
        assert (core.info.vocab_size, core.info.eos_token_ids) == (128, (1,))
    finally:
        core.shutdown()


def test_a_pool_without_room_for_a_block_gives_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(MemoryBudgetError, match="16384"):
        build_engine(loaded(tmp_path, cache={"memory_bytes": 1}))


BLOCK_BYTES = 8192


def test_a_written_length_that_the_pool_cannot_hold_is_refused_with_what_would_work(tmp_path: Path) -> None:
    """One null block and four for tokens: the message's numbers, and each of its ways out."""
    small = {"memory_bytes": 5 * BLOCK_BYTES}
    with pytest.raises(MemoryBudgetError) as caught:
        build_engine(loaded(tmp_path, max_model_len=256, cache=small))
    message = str(caught.value)
    for part in (
        "a request of 256 tokens takes 16 KV blocks of 8192 bytes, 131072 in all",
        "the pool has 4, 32768 bytes, and holds one of 64 tokens",
        "max_model_len at most 64",
        f"cache.memory_bytes {17 * BLOCK_BYTES} or more",
        "cache.dtype fp8",
    ):
        assert part in message
    assert "gpu_memory_utilization" not in message
    for tree in (
        {"max_model_len": 64, "cache": small},
        {"max_model_len": 256, "cache": {"memory_bytes": 17 * BLOCK_BYTES}},
        {"max_model_len": "auto", "cache": small},
    ):
        core, _ = build_engine(loaded(tmp_path, **tree))
        assert core.info.max_model_len == (256 if tree["max_model_len"] == 256 else 64)
        core.shutdown()


def test_a_refused_length_is_found_before_the_cache_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: Any, num_blocks: int) -> None:
        raise AssertionError(f"{num_blocks} blocks were allocated")

    monkeypatch.setattr(DeviceWorker, "initialize_kv_cache", never)
    with pytest.raises(MemoryBudgetError, match="takes 16 KV blocks"):
        build_engine(loaded(tmp_path, max_model_len=256, cache={"memory_bytes": 5 * BLOCK_BYTES}))


@pytest.mark.parametrize(("blocks", "enough"), [(7, False), (4000, True)])
def test_the_size_of_the_pool_says_where_it_comes_from(tmp_path: Path, blocks: int, enough: bool) -> None:
    """Two requests of 256 tokens take 32 blocks, beyond which none could be used."""
    tree = {"cache": {"memory_bytes": blocks * BLOCK_BYTES}, "scheduler": {"max_num_seqs": 2}}
    core, _ = build_engine(loaded(tmp_path, **tree))
    why = core.info.resolved.why["num_kv_blocks"]
    core.shutdown()
    assert core.info.resolved.num_kv_blocks == min(blocks, 33)
    assert f"{blocks * BLOCK_BYTES} bytes" in why
    assert ("2 requests of max_model_len take no more" in why) == enough


def test_a_pool_measured_on_a_gpu_tells_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = KVBudget(
        total=10**6, utilization=0.5, outside=10, weights=20, steps=30, workspaces=40, graphs=50, rounding=60
    )
    monkeypatch.setattr(DeviceWorker, "available_kv_memory", lambda self: budget.pool)
    monkeypatch.setattr(DeviceWorker, "kv_budget", lambda self: budget)
    core, _ = build_engine(loaded(tmp_path))
    why = core.info.resolved.why["num_kv_blocks"]
    core.shutdown()
    assert "50 of CUDA graphs" in why
    assert f"leave {budget.pool}" in why


@pytest.mark.parametrize("bay", ["attention", "executor", "scheduler"])
def test_wrong_options_are_refused_before_anything_starts(tmp_path: Path, bay: str) -> None:
    with pytest.raises(ConfigError, match=rf"{bay}\.options\.no_such .*unknown key"):
        explained(tmp_path, **{bay: {"options": {"no_such": 1}}})


# --- attention by phase and group ------------------------------------------------------------------------------------

TWIN = """
from dataclasses import replace

from enginebay import hookimpl
from enginebay_torch_attention import RECORD
from pydantic import BaseModel


class Options(BaseModel, extra="forbid"):
    split: int = 1


@hookimpl
def enginebay_attention_backends():
    return [replace(RECORD, name="twin", options=Options, priority=-1)]
"""


@pytest.fixture
def twin(tmp_path: Path) -> str:
    """A local plugin: torch's attention by another name, with an option."""
    file = tmp_path / "twin.py"
    file.write_text(TWIN)
    return str(file)


def test_a_group_that_the_model_lacks_is_refused_with_those_it_has(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"groups\.sliding \(Python arg.*no such layers; the groups of its layers: full"
    ):
        explained(tmp_path, attention={"backend": {"groups": {"sliding": "torch"}}})


def test_a_group_that_all_layers_are_in_may_be_named(tmp_path: Path, twin: str) -> None:
    made = explained(tmp_path, plugins=[twin], attention={"backend": {"groups": {"full": {"decode": "twin"}}}})
    assert {s.bay: (s.chosen and s.chosen.name, s.source) for s in made.attention.selections} == {
        "attention.decode": ("twin", "Python argument"),
        "attention.prefill": ("torch", "auto"),
    }


def test_options_of_several_backends_stand_under_their_names(tmp_path: Path, twin: str) -> None:
    backend = {"decode": "twin", "prefill": "torch"}

    def options(given: dict[str, Any]) -> list[Any]:
        made = explained(tmp_path, plugins=[twin], attention={"backend": backend, "options": given})
        return [chosen.model_dump() for _, chosen in attention_backends(made).values()]

    assert options({"twin": {"split": 2}}) == [{"split": 2}, {}]
    with pytest.raises(ConfigError, match=r"options\.twn \(.*attention uses torch and twin.*Did you mean 'twin'"):
        options({"twn": {"split": 2}})
    with pytest.raises(ConfigError, match=r"attention\.options\.twin\.spilt .*unknown key"):
        options({"twin": {"spilt": 2}})


@pytest.mark.parametrize("options", [{"split": 3}, {"twin": {"split": 3}}])
def test_options_of_one_backend_stand_by_themselves_or_under_its_name(
    tmp_path: Path, twin: str, options: dict[str, Any]
) -> None:
    made = explained(tmp_path, plugins=[twin], attention={"backend": "twin", "options": options})
    assert [chosen.model_dump() for _, chosen in attention_backends(made).values()] == [{"split": 3}, {"split": 3}]


def test_a_pool_beyond_the_memory_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(
        MemoryBudgetError, match=r"cache\.num_blocks .*: 10000000001 blocks of \d+ bytes are .*cpu has \d+"
    ):
        build_engine(loaded(tmp_path, cache={"num_blocks": 10**10}))
