"""Bad input is that request's own error; the engine serves on, and nothing leaks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from enginebay import LLM, SamplingParams
from enginebay.errors import (
    ConfigError,
    EngineBayError,
    EngineDeadError,
    ModelError,
    PluginNotFoundError,
    RequestError,
    RequestTooLargeError,
    ResolutionError,
    WeightsError,
)
from enginebay.interfaces.scheduler import SchedulerStats
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

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
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
GOOD: Any = {"prompt_token_ids": [5, 6, 7, 8]}


def folder(path: Path, **changes: Any) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return str(path)


def tiny(path: Path, **tree: Any) -> LLM:
    return LLM(model=folder(path), load_format="dummy", dtype="float32", device="cpu", **tree)


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with tiny(tmp_path / "m", cache={"num_blocks": 8}, scheduler={"max_num_seqs": 4}) as made:
        yield made


BAD: list[tuple[Any, dict[str, Any], type[EngineBayError], str]] = [
    ({"prompt_token_ids": []}, {}, RequestError, "empty"),
    ({"prompt_token_ids": [5, 128]}, {}, RequestError, "128"),
    ({"prompt_token_ids": [-1]}, {}, RequestError, "-1"),
    ({"prompt_token_ids": [5] * 300}, {}, RequestTooLargeError, "256|128"),
    ({"prompt_token_ids": [5] * 100}, {"max_tokens": 200}, RequestTooLargeError, "max_model_len|max_tokens"),
    ({"prompt_token_ids": [5]}, {"stop_token_ids": (999,)}, RequestError, "999"),
]


@pytest.mark.parametrize(("prompt", "params", "error", "words"), BAD)
def test_a_bad_request_is_refused_alone(
    llm: LLM, prompt: Any, params: dict[str, Any], error: type[EngineBayError], words: str
) -> None:
    before = llm.generate([GOOD], PARAMS)[0].outputs[0].token_ids
    bad = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "detokenize": False, **params})
    with pytest.raises(error, match=words):
        llm.generate([GOOD, prompt], [PARAMS, bad])
    assert llm.generate([GOOD], PARAMS)[0].outputs[0].token_ids == before
    stats = llm._client._core.stats()  # type: ignore[attr-defined]
    assert stats.num_free_blocks == stats.num_blocks


def test_c21_a_request_larger_than_the_pool_is_refused_at_admission(tmp_path: Path) -> None:
    with tiny(tmp_path / "m", cache={"num_blocks": 4}, max_model_len=256) as llm:
        with pytest.raises(RequestTooLargeError, match="KV"):
            llm.generate([{"prompt_token_ids": [5] * 100}], PARAMS)
        assert len(llm.generate([GOOD], PARAMS)[0].outputs[0].token_ids) == 8


def test_c7_a_length_fitted_to_the_pool_is_the_one_that_is_listed(tmp_path: Path) -> None:
    with tiny(tmp_path / "m", cache={"num_blocks": 4}) as llm:
        assert llm.info.max_model_len == 64
        with pytest.raises(RequestTooLargeError, match="64"):
            llm.generate([{"prompt_token_ids": [5] * 60}], PARAMS)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temprature": 1.0}, "did you mean temperature"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
    ],
)
def test_parameters_are_checked_and_never_ignored(values: dict[str, Any], words: str) -> None:
    """C6."""
    with pytest.raises(RequestError, match=words):
        SamplingParams(**values)


def test_configuration_errors_name_what_would_work(tmp_path: Path) -> None:
    """C5, C9, C11: unknown key, plugin, quantization, architecture."""
    with pytest.raises(ConfigError, match="max_num_seqs"):
        tiny(tmp_path / "m", scheduler={"max_num_seq": 4})
    with pytest.raises(PluginNotFoundError, match="torch"):
        tiny(tmp_path / "m", attention={"backend": "torhc"})
    with pytest.raises(PluginNotFoundError, match="gguf"):
        tiny(tmp_path / "m", quant={"method": "ggfu"})
    with pytest.raises((PluginNotFoundError, ResolutionError), match="LlamaForCausalLM"):
        LLM(
            model=folder(tmp_path / "x", architectures=["GlmForCausalLM"], model_type="glm"),
            load_format="dummy",
            device="cpu",
        )
    with pytest.raises(ResolutionError, match=r"world_size|rank"):
        tiny(tmp_path / "m", parallel={"tensor": 2})
    with pytest.raises(ConfigError, match="graphs"):
        tiny(tmp_path / "m", graphs={"decode_sizes": [1]})


def test_c60_a_length_beyond_the_rope_table_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="256"):
        tiny(tmp_path / "m", max_model_len=512)


def test_a_checkpoint_without_its_tokenizer_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        LLM(model=folder(tmp_path / "m"), dtype="float32", device="cpu", load_format="safetensors")


def test_c51_a_checkpoint_without_its_weights_does_not_start(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))).save_pretrained(path)
    with pytest.raises((ModelError, WeightsError), match="safetensors"):
        LLM(model=path, dtype="float32", device="cpu", load_format="safetensors")


def test_c5_an_unknown_key_in_a_yaml_file_is_named_with_its_file(tmp_path: Path) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text(f"model: {folder(tmp_path / 'm')}\nload_format: dummy\ncache:\n  blocksize: 16\n")
    says = r"cache\.blocksize \(.*engine\.yaml:4\): unknown key; did you mean cache\.block_size"
    with pytest.raises(ConfigError, match=says):
        LLM(config=config)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5, 9])
def test_c47_an_abort_at_any_step_gives_all_blocks_back(
    tmp_path: Path, idle_stats: Callable[[LLM], SchedulerStats], asynchronous: bool, num_steps: int
) -> None:
    """Waiting, in the middle of a chunked prompt, decoding: the neighbours' tokens stay what they are."""
    # A prompt of 60 tokens takes four steps of 16, and the pool holds two such requests: the third waits.
    scheduler = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "async_scheduling": asynchronous}
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
    with tiny(tmp_path / "m", cache={"num_blocks": 14}, max_model_len=112, scheduler=scheduler) as llm:
        alone = llm.generate([GOOD], long)[0].outputs[0].token_ids
        core = llm._client._core  # type: ignore[attr-defined]
        doomed = [llm.stream({"prompt_token_ids": [i + 2] * 60}, long) for i in range(2)]
        kept = llm.stream(GOOD, long)
        waiting = llm.stream({"prompt_token_ids": [9] * 60}, long)
        for _ in range(num_steps):
            llm._driver.advance()
        for stream in (*doomed, waiting):
            llm.abort(stream.request_id)
            llm.abort(stream.request_id)
        assert core.stats().num_waiting + core.stats().num_running <= 1
        assert [list(stream)[-1].outputs[0].finish_reason for stream in doomed] == ["abort"] * 2
        assert list(kept)[-1].outputs[0].token_ids == alone
        idle_stats(llm)
        assert llm.generate([GOOD], long)[0].outputs[0].token_ids == alone


def test_c47_closing_a_stream_midway_gives_all_blocks_back(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False)
    with llm.stream(GOOD, params) as stream:
        next(stream)
    llm.generate([GOOD], PARAMS)  # steps that still named the request retire
    stats = llm._client._core.stats()  # type: ignore[attr-defined]
    assert (stats.num_free_blocks, stats.num_running, stats.num_waiting) == (stats.num_blocks, 0, 0)


def test_an_engine_that_was_shut_down_says_so(tmp_path: Path) -> None:
    llm = tiny(tmp_path / "m")
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDeadError):
        llm.generate([GOOD], PARAMS)


def test_c48_a_failing_worker_ends_every_waiter_with_the_cause(llm: LLM) -> None:
    core = llm._client._core  # type: ignore[attr-defined]

    def broken(output: object) -> None:
        raise RuntimeError("device lost")

    core.executor._worker._runner.execute = broken
    with pytest.raises(EngineDeadError, match="device lost"):
        llm.generate([GOOD], PARAMS)
    with pytest.raises(EngineDeadError):
        llm.generate([GOOD], PARAMS)
