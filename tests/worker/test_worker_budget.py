"""The worker's share of a GPU: what it measures before the pool is made, and what is true after."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from enginebay import LLM, SamplingParams
from enginebay.config import load_config
from enginebay.engine.explanation import attention_backends, explain
from enginebay.errors import MemoryBudgetError
from enginebay.worker import worker as worker_module
from enginebay.worker.memory import ALLOCATION_UNIT, RACE_SLACK, DeviceMemory
from enginebay.worker.profiling import Rehearsal, peak_of_steps
from enginebay.worker.worker import DeviceWorker, WorkerSpec

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
}
BLOCK_BYTES = 2 * 16 * 2 * 64 * 4 * 2
MIB = 2**20


def tree(folder: Path, **changes: Any) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return {"model": str(folder), "load_format": "dummy", "dtype": "float32", **changes}


class Backend:
    def __init__(self, declared: int) -> None:
        self.declared = declared

    def workspace_bytes(self, bucket: Any) -> int:
        return self.declared


class Runtime:
    def __init__(self, *declared: int) -> None:
        self.decode, self.prefill = map(Backend, declared)
        self.batch: Any = "a step"
        self.decode_state: Any = "a state"
        self.prefill_state: Any = "a state"


class Fake:
    """A worker of the tiny model that takes itself to be on a GPU of 1000 MiB, 100 of which others hold."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        made = explain(load_config(None, tree(folder, device="cpu", **changes)))
        spec = WorkerSpec(
            config=made.config, resolved=made.resolved, parts=made.parts, cache=made.cache, attention={}, processors=()
        )
        self.worker = DeviceWorker(spec)
        self.worker.device = torch.device("cuda", 0)
        self.outside, self.bound = 100 * MIB, list[int]()
        self.worker._weight_bytes, self.worker._backend_bytes = 200 * MIB, 8 * MIB
        runtime: Any = Runtime(20 * MIB, 3 * MIB)
        self.worker._runtimes, self.runtime = (runtime,), runtime
        monkeypatch.setattr(self.worker, "_bind_cache", self._bind)
        monkeypatch.setattr(worker_module, "rehearse", lambda *_: Rehearsal(260 * MIB, 30 * MIB, self.outside))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000 * MIB - self.used, 1000 * MIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 200 * MIB)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200 * MIB)
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)

    @property
    def used(self) -> int:
        return self.outside + 200 * MIB

    def _bind(self, num_blocks: int) -> None:
        self.bound.append(num_blocks)
        self.worker._state_bytes = 5 * MIB
        self.worker._runner = "a runner"  # type: ignore[assignment]


def test_what_backends_took_already_is_not_counted_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(tmp_path, monkeypatch, cache={"gpu_memory_utilization": 0.5})
    pool = fake.worker.available_kv_memory()
    # 23 MiB are declared, of which 8 were taken by the backends and 5 by their states
    assert pool == (500 - 100 - 260 - (23 - 8 - 5) - 30) * MIB - 2 * ALLOCATION_UNIT
    assert fake.bound == [2]
    budget = fake.worker.kv_budget()
    assert budget is not None
    assert (budget.weights, budget.steps) == (200 * MIB, 60 * MIB)


def test_the_rehearsal_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(tmp_path, monkeypatch)
    fake.worker.available_kv_memory()
    assert fake.worker._runner is None
    assert fake.runtime.batch is fake.runtime.decode_state is fake.runtime.prefill_state is None


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
def test_the_steps_of_a_rehearsal_run_and_their_runner_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """On CPU, but for the figures: decode and prefill in the same seats, each row asking all there is to ask."""
    fakes = ("empty_cache", "reset_peak_memory_stats", "synchronize", "max_memory_reserved")
    for name in fakes:
        monkeypatch.setattr(torch.cuda, name, lambda *_: 1)
    changes: Any = {"scheduler": {"max_num_seqs": 5, "max_num_batched_tokens": 64}, "sampler": {"logprobs_mode": mode}}
    made = explain(load_config(None, tree(tmp_path, device="cpu", **changes)))
    worker = DeviceWorker(
        WorkerSpec(
            config=made.config,
            resolved=made.resolved,
            parts=made.parts,
            cache=made.cache,
            attention=attention_backends(made),
        )
    )
    worker.start()
    worker._bind_cache(2)
    runner = worker._require_runner()
    assert peak_of_steps(runner, 64, worker.device) == 1
    assert runner.batch.num_computed[:5].tolist() == [64 - 4 * 12, 12, 12, 12, 12]
    freed = weakref.ref(runner)
    del runner
    worker._forget_steps()
    assert freed() is None


def test_a_share_that_does_not_hold_the_weights_is_refused_with_each_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(tmp_path, monkeypatch, cache={"gpu_memory_utilization": 0.2})
    with pytest.raises(MemoryBudgetError, match=rf"needs {2 * BLOCK_BYTES} .*{200 * MIB} of weights, {60 * MIB} at .*"):
        fake.worker.available_kv_memory()


def test_another_process_that_came_in_between_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(tmp_path, monkeypatch)
    fake.worker.available_kv_memory()
    fake.outside += RACE_SLACK + 1
    with pytest.raises(MemoryBudgetError, match=f"another process took {RACE_SLACK + 1} bytes"):
        fake.worker.initialize_kv_cache(9)
    assert fake.bound == [2]
    fake.outside -= 1
    fake.worker.initialize_kv_cache(9)
    assert fake.bound == [2, 9]


@pytest.mark.parametrize(("utilization", "level"), [(0.5, logging.INFO), (0.4505, logging.WARNING)])
def test_more_than_the_limit_after_the_start_is_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    utilization: float,
    level: int,
) -> None:
    fake = Fake(tmp_path, monkeypatch, cache={"gpu_memory_utilization": utilization})
    fake.worker.available_kv_memory()
    fake.outside += 100 * MIB
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300 * MIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (540 * MIB, 1000 * MIB))
    with caplog.at_level(logging.INFO, "enginebay"):
        fake.worker.initialize_kv_cache(9)
    assert [record.levelno for record in caplog.records] == [level]
    assert f"{460 * MIB} bytes of cuda:0 are used" in caplog.text


def test_bytes_that_the_user_fixed_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(tmp_path, monkeypatch, cache={"memory_bytes": 12345})
    assert fake.worker.available_kv_memory() == 12345
    assert fake.bound == []
    assert fake.worker.kv_budget() is None


def test_weights_that_do_not_fit_are_refused_with_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(tmp_path, monkeypatch)

    def load(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(worker_module, "load_model", load)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    layer = 256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 512 + 2 * 256
    weights = 4 * (2 * layer + 2 * 512 * 256 + 256)
    with pytest.raises(
        MemoryBudgetError, match=rf"{weights} bytes of weights.*did not fit cuda:0: of its {1000 * MIB}"
    ):
        fake.worker.start()


# --- on a GPU --------------------------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture
def others() -> Iterator[list[torch.Tensor]]:
    """Tensors that make the device smaller; freed afterwards."""
    held: list[torch.Tensor] = []
    yield held
    held.clear()
    torch.cuda.empty_cache()


def share(extra_bytes: int) -> float:
    """A utilization that leaves `extra_bytes` beyond what is in use now."""
    memory = DeviceMemory.settled(torch.device("cuda", 0))
    return (memory.used + extra_bytes) / memory.total


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("sizes", [[], [1], [1, 2, 4, 8, 16, 24, 32]])
def test_gpu_no_more_than_the_share_is_used_whatever_runs(tmp_path: Path, sizes: list[int]) -> None:
    options = tree(tmp_path, device="cuda", dtype="bfloat16")
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 4096}))
    with LLM(
        **options,
        graphs={"decode_sizes": sizes},
        scheduler={"max_num_seqs": 4096},
        cache={"gpu_memory_utilization": share(4 << 30)},
    ) as llm:
        limit = llm.info.config.cache.gpu_memory_utilization * torch.cuda.mem_get_info()[1]
        started = DeviceMemory.read(torch.device("cuda", 0)).used
        prompts: Any = [{"prompt_token_ids": [2 + i % 500] * 100} for i in range(300)]
        llm.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False, logprobs=5))
        used = DeviceMemory.read(torch.device("cuda", 0)).used
        assert "of CUDA graphs" in llm.info.resolved.why["num_kv_blocks"]
    assert started <= limit + 64 * MIB
    assert used <= limit + 64 * MIB
    assert started >= limit - (2 << 30)  # and most of it is given out


@pytest.mark.gpu
@needs_gpu
def test_gpu_a_share_below_the_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MemoryBudgetError, match=r"of weights.*leave -\d+"):
        LLM(**tree(tmp_path, device="cuda"), cache={"gpu_memory_utilization": 0.0001})


@pytest.mark.gpu
@needs_gpu
def test_gpu_weights_that_do_not_fit_are_refused(tmp_path: Path, others: list[torch.Tensor]) -> None:
    options = tree(tmp_path, device="cuda")
    wide = {**CONFIG, "hidden_size": 8192, "intermediate_size": 32768}
    (tmp_path / "config.json").write_text(json.dumps(wide))
    others.append(torch.empty(torch.cuda.mem_get_info()[0] - (1 << 30), dtype=torch.uint8, device="cuda"))
    with pytest.raises(MemoryBudgetError, match=r"bytes of weights.*did not fit cuda:0"):
        LLM(**options)
