"""What the end-to-end tests share: the stored reference, the script that made it, and an engine's block counts."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from enginebay import LLM
from enginebay.interfaces.scheduler import SchedulerStats

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    """A prompt and transformers' greedy answer, as token ids."""

    prompt: list[int]
    output: list[int]


@dataclass(frozen=True)
class Reference:
    """data/reference.json; see make_reference.py."""

    eos: list[int]
    max_tokens: int
    rows: list[Row]
    #: answers of `long_tokens` tokens that none of them ends
    long: list[Row]
    long_tokens: int


@pytest.fixture(scope="session")
def reference() -> Reference:
    stored: dict[str, Any] = json.loads((HERE / "data" / "reference.json").read_text(encoding="utf-8"))
    for key in ("rows", "long"):
        stored[key] = [Row(**row) for row in stored[key]]
    return Reference(**stored)


@pytest.fixture(scope="session")
def maker() -> ModuleType:
    """make_reference.py as a module."""
    spec = importlib.util.spec_from_file_location("make_reference", HERE / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def idle_stats() -> Callable[[LLM], SchedulerStats]:
    """Runs an engine until nothing is in flight, checks that it holds nothing, and returns its counters."""

    def run_out(llm: LLM) -> SchedulerStats:
        core = llm._client._core  # type: ignore[attr-defined]
        while core.has_unfinished():
            core.step()
        stats: SchedulerStats = core.stats()
        assert stats.num_free_blocks == stats.num_blocks > 0
        assert (stats.num_running, stats.num_waiting, stats.num_in_flight_steps) == (0, 0, 0)
        return stats

    return run_out


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama of two layers as transformers saves it, without a tokenizer's worth of vocabulary."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        # The default of 0.02 hardly lets attention speak.
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder, safe_serialization=True)
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0").save_pretrained(folder)
    return str(folder)
