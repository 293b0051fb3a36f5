"""Assembly: what a configuration becomes on this machine, over a random model of two layers on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from enginebay.config import load_config
from enginebay.engine.assembly import Explanation, build_engine, explain
from enginebay.errors import ConfigError, MemoryBudgetError

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


def test_graphs_on_cpu_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"graphs\.decode_sizes"):
        explained(tmp_path, graphs={"decode_sizes": [1]})


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


@pytest.mark.parametrize("bay", ["attention", "executor", "scheduler"])
def test_wrong_options_are_refused_before_anything_starts(tmp_path: Path, bay: str) -> None:
    with pytest.raises(ConfigError, match=rf"{bay}\.options\.no_such .*unknown key"):
        explained(tmp_path, **{bay: {"options": {"no_such": 1}}})
