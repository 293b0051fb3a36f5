"""A tiny Llama on disk, and the configuration that names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from enginebay.config import LoadedConfig, load_config


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, a vocabulary of 97, weights in float32, no tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=5,
    )
    transformers.LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture
def settings(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """``--set`` values of the tiny model for any engine that makes random weights."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return [f"model={tiny_model}", "load_format=dummy", "dtype=float32"]


@pytest.fixture
def loaded(settings: list[str]) -> Callable[..., LoadedConfig]:
    """Loads the tiny model's configuration with further settings."""
    return lambda *more: load_config(overrides=[*settings, *more], env={})
