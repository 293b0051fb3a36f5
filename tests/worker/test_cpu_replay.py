"""Recorded decode steps: the same tokens as from Python, and given up where they cannot be."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from enginebay import LLM, SamplingParams
from enginebay.kernels.cpu import ops
from enginebay.kernels.cpu.recording import Recording
from enginebay.worker import cpu_replay
from enginebay.worker.cpu_replay import DecodeReplays
from transformers import LlamaConfig, Qwen3Config

pytestmark = pytest.mark.skipif(not ops.has_linear(), reason="the kernel of bfloat16 products is not to be had here")

PROMPTS: list[Any] = [{"prompt_token_ids": list(range(2, 2 + n))} for n in (1, 5, 16, 40, 33, 2)]
SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
}


def params(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def folder(path: Path, config: Any, architecture: str) -> str:
    config.architectures = [architecture]
    config.save_pretrained(path)
    return str(path)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    return folder(tmp_path / "llama", LlamaConfig(**SHAPE), "LlamaForCausalLM")


def tokens(model: str, **tree: Any) -> tuple[list[list[int]], DecodeReplays]:
    """Answers of unequal length, so that the number of rows changes; twice, so that every number is replayed."""
    with LLM(model, load_format="dummy", dtype="bfloat16", device="cpu", **tree) as llm:
        replays = llm._client._core.executor._worker._runner._replays  # type: ignore[attr-defined]
        for _ in range(2):
            outputs = llm.generate(PROMPTS, [params(4 + 6 * i) for i in range(len(PROMPTS))])
        return [o.outputs[0].token_ids for o in outputs], replays


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_replayed_steps_give_the_tokens_of_steps_from_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, asynchronous: bool
) -> None:
    model = folder(tmp_path / "m", LlamaConfig(**SHAPE, tie_word_embeddings=tied), "LlamaForCausalLM")
    scheduler = {"async_scheduling": asynchronous}
    found, replays = tokens(model, scheduler=scheduler)
    assert replays.possible
    assert len(replays._replays) == len(PROMPTS)
    monkeypatch.setattr(DecodeReplays, "logits", lambda self, batch: None)
    assert tokens(model, scheduler=scheduler)[0] == found


def test_float32_runs_from_python_and_says_why(llama: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), LLM(llama, load_format="dummy", dtype="float32", device="cpu") as llm:
        llm.generate(PROMPTS, params(8))
        replays = llm._client._core.executor._worker._runner._replays  # type: ignore[attr-defined]
    assert not replays.possible
    assert "cannot be replayed" in caplog.text


def test_parts_that_did_not_say_so_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from enginebay_torch_attention.backend import TorchAttention

    model = folder(tmp_path / "m", LlamaConfig(**SHAPE), "LlamaForCausalLM")
    found, _ = tokens(model)
    monkeypatch.setattr(TorchAttention, "replayable", property(lambda self: False, lambda self, value: None), False)
    again, replays = tokens(model)
    assert not replays.possible
    assert replays._replays == {}
    assert again == found


def test_memory_of_recordings_is_bounded(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, replays = tokens(llama)
    sizes = {rows: r.recording.num_bytes for rows, r in replays._replays.items()}
    most = sizes[1] + sizes[2]
    monkeypatch.setattr(cpu_replay, "_MOST_BYTES", most)
    again, replays = tokens(llama)
    assert again == found
    assert 0 < sum(r.recording.num_bytes for r in replays._replays.values()) <= most


def test_a_model_with_torch_operators_between_the_kernels_runs_from_python(tmp_path: Path) -> None:
    """Qwen3's norms of heads are strided."""
    model = folder(tmp_path / "q", Qwen3Config(**SHAPE, head_dim=16), "Qwen3ForCausalLM")
    found, replays = tokens(model)
    assert not replays.possible
    assert all(len(t) == 4 + 6 * i for i, t in enumerate(found))


def test_a_replay_that_differs_is_not_used(
    llama: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found, _ = tokens(llama)
    monkeypatch.setattr(Recording, "replay", lambda self: None)
    with caplog.at_level(logging.WARNING):
        again, replays = tokens(llama)
    assert again == found
    assert not replays.possible
    assert "differs from the recorded one" in caplog.text
    assert torch.is_inference_mode_enabled() is False
