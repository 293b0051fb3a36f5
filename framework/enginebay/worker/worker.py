"""One rank's worker: device, model, weights, cache, runner. Implements `enginebay.interfaces.executor.Worker`."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from enginebay.config import EngineConfig, ResolvedConfig
from enginebay.errors import ExecutorError, MemoryBudgetError
from enginebay.interfaces.attention import AttentionBackend, AttentionContext
from enginebay.interfaces.batch import Bucket, torch_dtype
from enginebay.interfaces.executor import KVCacheSpec
from enginebay.interfaces.model import CausalLM
from enginebay.interfaces.sampler import ProcessorContext
from enginebay.interfaces.scheduler import ModelOutput, SchedulerOutput
from enginebay.layers.attention import AttentionRuntime
from enginebay.plugins.records import NoOptions, Phase
from enginebay.plugins.selection import AttentionPart
from enginebay.sampling.pipeline import Sampler
from enginebay.worker.batch import SlotBatch
from enginebay.worker.host_threads import size_threads
from enginebay.worker.memory import (
    ALLOCATION_UNIT,
    CPU_SHARE,
    FREE_MEMORY,
    DeviceMemory,
    KVBudget,
    host_memory_bytes,
    out_of_memory_explained,
)
from enginebay.worker.model_loader import ModelParts, build_model, load_model
from enginebay.worker.model_runner import ModelRunner
from enginebay.worker.processors import ProcessorPart, build_processors
from enginebay.worker.profiling import rehearse
from enginebay.worker.step_result import CopyingFuture, done

__all__ = ["DeviceWorker", "ProcessorPart", "WorkerSpec", "allocate_cache"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Everything that a worker is made from: the same for all ranks."""

    config: EngineConfig
    resolved: ResolvedConfig
    parts: ModelParts
    cache: KVCacheSpec
    #: factory and options of the backend of each phase of each group of layers (`AttentionSpec.cache_kind`)
    attention: Mapping[AttentionPart, tuple[Any, Any]]
    #: logits processors by plugins, in the order that they run
    processors: tuple[ProcessorPart, ...] = ()
    #: ids from here on only pad the model's vocabulary and are never drawn; None: all ids may be
    vocab_limit: int | None = None


class DeviceWorker:
    """A rank on a CUDA device or on the CPU."""

    def __init__(self, spec: WorkerSpec, rank: int = 0) -> None:
        self.spec = spec
        self.rank = rank
        resolved = spec.resolved
        self.device = torch.device(resolved.device, rank) if resolved.device == "cuda" else torch.device("cpu")
        self._model: CausalLM | None = None
        self._runner: ModelRunner | None = None
        self._sampler: Sampler | None = None
        self._runtimes: tuple[AttentionRuntime, ...] = ()
        self._output_stream: torch.cuda.Stream | None = None
        self._weight_bytes = self._backend_bytes = self._state_bytes = 0
        self._budget: KVBudget | None = None

    # --- start ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the device, build the model and load its weights."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            self._output_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        else:
            size_threads()
        with out_of_memory_explained(
            self.device,
            lambda: f"{_weight_bytes(self.spec.parts)} bytes of weights, with buffers for attention and sampling,",
            "choose a smaller or quantized model, or end other processes on the device",
        ):
            self._load()

    def _load(self) -> None:
        self._model = load_model(self.spec.parts, self.device)
        self._weight_bytes = self._allocated()
        self._runtimes = tuple(
            AttentionRuntime(
                group=index, decode=self._backend("decode", index), prefill=self._backend("prefill", index)
            )
            for index in range(len(self.spec.cache.groups))
        )
        self._backend_bytes = self._allocated() - self._weight_bytes
        self._sampler = self._make_sampler()

    def kv_cache_spec(self) -> KVCacheSpec:
        """What this rank's layers ask of the cache."""
        return self.spec.cache

    def available_kv_memory(self) -> int:
        """Bytes for the KV cache: what the user fixed, or what a rehearsal of the largest steps and graphs leaves."""
        fixed = self.spec.config.cache.memory_bytes
        if fixed != "auto":
            return fixed
        if self.device.type == "cpu":
            return int(host_memory_bytes() * CPU_SHARE)
        self._budget = self._measure()
        return self._budget.require(2 * self.spec.cache.block_bytes(torch_dtype(self.spec.resolved.kv_dtype).itemsize))

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocate the cache, and capture the graphs that the configuration asks for."""
        if self._budget is not None:
            self._budget.check_others(DeviceMemory.settled(self.device))
        self._bind_cache(num_blocks)
        if self.spec.config.graphs.decode_sizes:
            with out_of_memory_explained(
                self.device, lambda: "CUDA graphs", f"lower cache.memory_bytes, {FREE_MEMORY}"
            ):
                self._require_runner().capture(self.spec.config.graphs.decode_sizes)
        if self._budget is not None:
            used = DeviceMemory.settled(self.device).used
            level = logging.WARNING if used > self._budget.limit else logging.INFO
            logger.log(level, "after the start %d bytes of %s are used; %s", used, self.device, self._budget)

    def kv_budget(self) -> KVBudget | None:
        """How the pool's size came about, where it was measured."""
        return self._budget

    # --- steps ---------------------------------------------------------------------------------------------------------

    def execute_model(self, output: SchedulerOutput) -> None:
        """Run a step as far as its logits."""
        self._require_runner().execute(output)

    def sample(self) -> Future[ModelOutput]:
        """Sample; the future completes when the result is on the host, without holding up the next step's launch."""
        result = self._require_runner().sample()
        if self._output_stream is None or result.token_ids is None:
            return done(result.to_host())
        return CopyingFuture(result, self._output_stream)

    def shutdown(self) -> None:
        """Drop the model and the cache."""
        self._runner = self._model = self._sampler = None
        self._runtimes = ()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # --- parts ---------------------------------------------------------------------------------------------------------

    def _require_runner(self) -> ModelRunner:
        if self._runner is None:
            raise ExecutorError(f"rank {self.rank}: the KV cache has not been initialised")
        return self._runner

    def _allocated(self) -> int:
        """Bytes of tensors on the device; on CPU they are not counted."""
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def _measure(self) -> KVBudget:
        """Rehearse over a cache of two blocks, whose rows all read the null block, and sum up."""
        config, resolved = self.spec.config, self.spec.resolved
        tokens, seats = resolved.max_num_batched_tokens, config.scheduler.max_num_seqs
        with out_of_memory_explained(self.device, lambda: f"steps of {tokens} tokens and {seats} rows", FREE_MEMORY):
            self._bind_cache(2)
            found = rehearse(self._require_runner(), tokens, config.graphs.decode_sizes, self.device)
        bucket = Bucket(seats, tokens)
        declared = sum(r.decode.workspace_bytes(bucket) + r.prefill.workspace_bytes(bucket) for r in self._runtimes)
        self._forget_steps()
        return KVBudget(
            total=DeviceMemory.read(self.device).total,
            utilization=config.cache.gpu_memory_utilization,
            outside=found.outside,
            weights=self._weight_bytes,
            steps=found.peak - self._weight_bytes,
            # Backends declare all that they take; what they took when they and their states were made is in the peak.
            workspaces=max(0, declared - self._backend_bytes - self._state_bytes),
            graphs=found.graphs,
            rounding=ALLOCATION_UNIT * self.spec.cache.num_tensors,
        )

    def _forget_steps(self) -> None:
        """Free all that steps needed. The runner stands in reference cycles, so it takes the collector."""
        self._runner = None
        for runtime in self._runtimes:
            runtime.batch = runtime.decode_state = runtime.prefill_state = None
        gc.collect()
        torch.cuda.empty_cache()

    def _backend(self, phase: Phase, group: int) -> AttentionBackend:
        spec, resolved, scheduler = self.spec, self.spec.resolved, self.spec.config.scheduler
        layers = spec.cache.groups[group].spec
        factory, options = spec.attention[layers.cache_kind, phase]
        backend = factory(
            AttentionContext(
                spec=layers,
                group=group,
                phase=phase,
                dtype=torch_dtype(resolved.dtype),
                kv_dtype=torch_dtype(resolved.kv_dtype),
                device=self.device,
                block_size=resolved.block_size,
                layout=spec.cache.layout,
                max_num_rows=scheduler.max_num_seqs,
                max_num_tokens=max(resolved.max_num_batched_tokens, scheduler.max_num_seqs),
                max_model_len=resolved.max_model_len,
                options=options,
            )
        )
        assert isinstance(backend, AttentionBackend)
        return backend

    @property
    def _vocab_limit(self) -> int:
        size = int(self.spec.parts.hf_config.vocab_size)
        return size if self.spec.vocab_limit is None else min(self.spec.vocab_limit, size)

    def _make_sampler(self) -> Sampler:
        config = self.spec.config
        context = ProcessorContext(
            vocab_size=self._vocab_limit,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=self.spec.resolved.max_model_len,
            device=self.device,
            options=NoOptions(),
        )
        return Sampler(context, build_processors(self.spec.processors, context), config.sampler.logprobs_mode)

    def _bind_cache(self, num_blocks: int) -> None:
        assert self._model is not None
        cache, resolved = self.spec.cache, self.spec.resolved
        tensors = [allocate_cache(cache, j, num_blocks, self.device) for j in range(cache.num_tensors)]
        scales = self.spec.config.cache
        for runtime, group in zip(self._runtimes, cache.groups, strict=True):
            for j, layer in enumerate(group.layers):
                self._model.attention_layers[layer].bind(
                    runtime, tensors[j], k_scale=scales.key_scale, v_scale=scales.value_scale
                )
        tokens = max(resolved.max_num_batched_tokens, self.spec.config.scheduler.max_num_seqs)
        batch = SlotBatch(
            max_num_seqs=self.spec.config.scheduler.max_num_seqs,
            max_num_tokens=tokens,
            max_model_len=resolved.max_model_len,
            block_size=resolved.block_size,
            num_groups=len(cache.groups),
            device=self.device,
        )
        assert self._sampler is not None
        before = self._allocated()
        self._runner = ModelRunner(
            self._model,
            batch,
            self._runtimes,
            tokens,
            sampler=self._sampler,
            prompt_logits=self.spec.config.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
            vocab_limit=self._vocab_limit,
        )
        self._state_bytes = self._allocated() - before


def _weight_bytes(parts: ModelParts) -> int:
    """Bytes of the model's parameters, without making them."""
    model, _ = build_model(parts, "meta")
    return sum(parameter.nbytes for parameter in model.parameters())


def allocate_cache(cache: KVCacheSpec, index: int, num_blocks: int, device: torch.device) -> Tensor:
    """Cache tensor `index`, contiguous in the layout's order, seen as ``[blocks, 2, block, kv_heads, head_dim]``.

    On CPU pages are not touched (they cost nothing until used) but for the null block, which padding rows read.
    """
    spec = next(g.spec for g in cache.groups if len(g.layers) > index)
    sizes = {
        "blocks": num_blocks,
        "kv": 2,
        "block": cache.block_size,
        "kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
    }
    shape, dtype = [sizes[a] for a in cache.layout.axes], torch_dtype(cache.kv_dtype)
    try:
        stored = torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:  # torch's allocators raise nothing more telling
        raise MemoryBudgetError(
            f"a KV cache of {num_blocks} blocks takes {math.prod(shape) * dtype.itemsize} bytes for each of "
            f"{cache.num_tensors} tensors, more than {device} gives: lower cache.num_blocks or cache.memory_bytes ({error})"
        ) from error
    canonical = stored.permute([cache.layout.axes.index(a) for a in sizes])
    # On GPUs some kernels load whole blocks: what lies past a row's last token must be finite.
    (canonical if device.type == "cuda" else canonical[0]).zero_()
    return canonical
