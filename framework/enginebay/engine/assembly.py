"""Assembly: from a configuration to a running engine, in titled stages. Choices are the resolver's; this gives it facts.

`explain` stops before anything is loaded; `build_engine` goes on.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from enginebay.config import AUTO_BATCHED_TOKENS, EngineConfig, LoadedConfig, ResolvedConfig, validate_options
from enginebay.engine.core import EngineCore, EngineInfo
from enginebay.engine.hardware import choose_dtype, detect
from enginebay.errors import ConfigError, MemoryBudgetError
from enginebay.interfaces.batch import torch_dtype
from enginebay.interfaces.executor import CacheGroup, Executor, ExecutorContext, KVCacheSpec
from enginebay.interfaces.quant import QuantContext
from enginebay.interfaces.scheduler import Scheduler, SchedulerContext, SchedulingPolicy
from enginebay.kv_cache.coordinator import KVCacheCoordinator
from enginebay.layers.rotary import position_limit
from enginebay.loading.hf_config import eos_token_ids, load_hf_config
from enginebay.loading.tokenizer import load_tokenizer
from enginebay.models.reference import ModelFiles, resolve_model, resolve_tokenizer
from enginebay.plugins.attention import Wish, resolve_attention
from enginebay.plugins.loader import PluginLoader
from enginebay.plugins.making import make
from enginebay.plugins.records import LogitsProcessorRecord, Phase, SchedulerRecord
from enginebay.plugins.requirements import AttentionSpec, Hardware, Requirements
from enginebay.plugins.resolver import resolve
from enginebay.plugins.selection import AttentionPart, AttentionSelection, Selection, identities, switched_off
from enginebay.plugins.suggest import did_you_mean
from enginebay.scheduling.scheduler import TokenBudgetScheduler
from enginebay.worker.memory import num_kv_blocks
from enginebay.worker.model_loader import ModelParts, build_model
from enginebay.worker.worker import DeviceWorker, ProcessorPart, WorkerSpec

#: what YAML calls fp8, by torch's name
FP8 = "float8_e4m3fn"
PHASES: tuple[Phase, ...] = ("decode", "prefill")


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What would run, and why; nothing is loaded yet."""

    loaded: LoadedConfig
    resolved: ResolvedConfig
    hardware: Hardware
    files: ModelFiles
    parts: ModelParts
    attention: AttentionSelection
    executor: Selection
    scheduler: Selection
    #: one a logits processor, in the order that they run
    processors: tuple[Selection, ...]
    #: all bays, in the report's order
    selections: tuple[Selection, ...]
    cache: KVCacheSpec
    loader: PluginLoader

    @property
    def config(self) -> EngineConfig:
        """The configuration as written."""
        return self.loaded.config

    @property
    def max_concurrent_batches(self) -> int:
        """Steps in flight: 1 where the user or a part switched asynchronous scheduling off."""
        off = any(s.feature == "async_scheduling" for s in switched_off(self.selections))
        if off or not self.config.scheduler.async_scheduling:
            return 1
        return int(getattr(self.executor.chosen, "max_concurrent_batches", 1))


# --- choosing --------------------------------------------------------------------------------------------------------


def explain(loaded: LoadedConfig) -> Explanation:
    """Resolve every bay without loading weights."""
    config = loaded.config
    # plugins
    loader = PluginLoader()
    for reference in config.plugins:
        loader.add_local(reference)
    # model files and what they say
    files = resolve_model(config.model, load_format=config.load_format)
    hf_config = load_hf_config(files)
    quant_config = _quantization(hf_config, files, dummy=config.load_format == "dummy")
    # device and sizes
    hardware = detect(config.device)
    if config.graphs.decode_sizes and hardware.device != "cuda":
        raise ConfigError(
            f"graphs.decode_sizes ({loaded.where('graphs.decode_sizes')}): CUDA graphs need device cuda, not "
            f"{hardware.device}; set graphs.decode_sizes: []"
        )
    _check_scales(loaded)
    sizes = _sizes(config, hf_config, hardware)
    requirements = _requirements(config, sizes, hardware, hf_config, quant_config)
    # model and quantizer, then the layers that they make
    model = resolve("model", "auto", "auto", requirements, loader)
    quant_wanted = "auto" if config.quant == "auto" else config.quant.method
    quant = resolve("quant", quant_wanted, _source(loaded, "quant"), requirements, loader)
    parts = _model_parts(loaded, files, hf_config, sizes, model, quant, quant_config)
    specs = _attention_specs(parts)
    requirements = replace(requirements, attention=tuple(dict.fromkeys(specs)))
    # the other bays
    attention = resolve_attention(_attention_wishes(loaded, specs), requirements, loader)
    executor = resolve("executor", config.executor.backend, _source(loaded, "executor.backend"), requirements, loader)
    scheduler = resolve("scheduler", config.scheduler.policy, _source(loaded, "scheduler.policy"), requirements, loader)
    processors = _processors(loaded, requirements, loader)
    resolved = replace(sizes, block_size=attention.block_size, kv_dtype=attention.kv_dtype)
    explanation = Explanation(
        loaded=loaded,
        resolved=resolved,
        hardware=hardware,
        files=files,
        parts=parts,
        attention=attention,
        executor=executor,
        scheduler=scheduler,
        processors=processors,
        selections=(model, *attention.selections, quant, *processors, scheduler, executor),
        cache=_cache_spec(specs, attention),
        loader=loader,
    )
    _check_options(explanation)
    return explanation


def _check_options(explanation: Explanation) -> None:
    """Refuse wrong options of the chosen parts here, so that `explain` never shows what would not start."""
    config, where = explanation.config, explanation.loaded.where
    _backends(explanation)
    for selection in explanation.processors:
        _processor_part(explanation, selection)
    for part, options, path in (
        (explanation.executor, config.executor.options, "executor.options"),
        (explanation.scheduler, config.scheduler.options, "scheduler.options"),
    ):
        assert part.chosen is not None
        validate_options(part.chosen.options, options, path, where)


def _source(loaded: LoadedConfig, path: str) -> str:
    return str(loaded.source(path))


def _processors(loaded: LoadedConfig, requirements: Requirements, loader: PluginLoader) -> tuple[Selection, ...]:
    """The logits processors that the configuration names; ones named twice, and options of others, are errors."""
    sampler = loaded.config.sampler
    names = sampler.processors
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"sampler.processors ({loaded.where('sampler.processors')}): {', '.join(twice)}: named twice")
    if unknown := [name for name in sampler.options if name not in names]:
        raise ConfigError(
            f"sampler.options.{unknown[0]} ({loaded.where(f'sampler.options.{unknown[0]}')}): no such processor runs; "
            f"sampler.processors names {', '.join(names) or 'none'}"
        )
    source = _source(loaded, "sampler.processors")
    return tuple(resolve("sampler", name, source, requirements, loader, label=name) for name in names)


def _quantization(hf_config: Any, files: ModelFiles, *, dummy: bool) -> Mapping[str, Any]:
    if dummy:
        return {}
    if files.kind == "gguf":
        return {"quant_method": "gguf"}
    found = getattr(hf_config, "quantization_config", None) or {}
    return dict(found) if isinstance(found, Mapping) else dict(found.to_dict())


def _sizes(config: EngineConfig, hf_config: Any, hardware: Hardware) -> ResolvedConfig:
    why: dict[str, str] = {}
    dtype, reason = choose_dtype(config.dtype, hf_config, hardware)
    if reason:
        why["dtype"] = reason
    why["device"] = f"{hardware.name}, asked for as {config.device}"
    limit = _length_limit(hf_config)
    length = limit if config.max_model_len == "auto" else config.max_model_len
    if config.max_model_len == "auto":
        why["max_model_len"] = "positions that the model's rope covers"
    wanted = config.scheduler.max_num_batched_tokens
    tokens = AUTO_BATCHED_TOKENS[hardware.device] if wanted == "auto" else wanted
    if wanted == "auto":
        why["max_num_batched_tokens"] = f"the default on {hardware.device}"
        if not config.scheduler.chunked_prefill:
            tokens = max(tokens, length)
            why["max_num_batched_tokens"] = "chunked_prefill is off, so a step must hold the longest prompt"
    kv_dtype = {"auto": dtype, "fp8": FP8}.get(config.cache.dtype, config.cache.dtype)
    if config.cache.dtype == "auto":
        why["kv_dtype"] = "the compute dtype"
    if config.cache.block_size == "auto":
        why["block_size"] = "the smallest that every attention backend reads, 16 at least"
    return ResolvedConfig(
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=hardware.device,
        max_model_len=length,
        block_size=0,
        max_num_batched_tokens=tokens,
        why=why,
    )


def _check_scales(loaded: LoadedConfig) -> None:
    """Scales belong to fp8 caches; on others they would be ignored."""
    cache = loaded.config.cache
    for name, scale in (("key_scale", cache.key_scale), ("value_scale", cache.value_scale)):
        if scale != 1.0 and cache.dtype != "fp8":
            raise ConfigError(
                f"cache.{name} ({loaded.where(f'cache.{name}')}): only an fp8 cache is scaled; set cache.dtype: fp8, or "
                f"leave cache.{name} out"
            )


def _length_limit(hf_config: Any) -> int:
    layer_types = set(getattr(hf_config, "layer_types", None) or ())
    parameters = getattr(hf_config, "rope_parameters", None) or {}
    by_type = [t for t in layer_types if isinstance(parameters.get(t), Mapping)]
    return min((position_limit(hf_config, t) for t in by_type), default=0) or position_limit(hf_config)


def _requirements(
    config: EngineConfig,
    sizes: ResolvedConfig,
    hardware: Hardware,
    hf_config: Any,
    quant_config: Mapping[str, Any],
) -> Requirements:
    return Requirements(
        hardware=hardware,
        dtype=sizes.dtype,
        kv_dtype=sizes.kv_dtype,
        architecture=hf_config.architectures[0],
        block_size=None if config.cache.block_size == "auto" else config.cache.block_size,
        quant_method=quant_config.get("quant_method"),
        model_config=hf_config.to_dict(),
        max_model_len=sizes.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        tensor_parallel=config.parallel.tensor,
        pipeline_parallel=config.parallel.pipeline,
        graphs=bool(config.graphs.decode_sizes),
        async_scheduling=config.scheduler.async_scheduling,
    )


def _model_parts(
    loaded: LoadedConfig,
    files: ModelFiles,
    hf_config: Any,
    sizes: ResolvedConfig,
    model: Selection,
    quant: Selection,
    quant_config: Mapping[str, Any],
) -> ModelParts:
    config = loaded.config
    assert model.chosen is not None
    quantizer = None
    if quant.chosen is not None:
        options = {} if config.quant == "auto" else config.quant.options
        context = QuantContext(
            quantization_config=quant_config,
            dtype=torch_dtype(sizes.dtype),
            options=validate_options(quant.chosen.options, options, "quant.options", loaded.where),
        )
        quantizer = (quant.chosen.factory, context)
    return ModelParts(
        files=files,
        hf_config=hf_config,
        model=model.chosen.factory,
        quant=quantizer,
        dtype=sizes.dtype,
        max_model_len=sizes.max_model_len,
        dummy_seed=config.seed if config.load_format == "dummy" else None,
    )


def _attention_specs(parts: ModelParts) -> list[AttentionSpec]:
    model, _ = build_model(parts, "meta")
    return [layer.spec for layer in model.attention_layers]


def _attention_wishes(loaded: LoadedConfig, specs: list[AttentionSpec]) -> dict[AttentionPart, Wish]:
    """What the configuration asks for in each phase of each group that the model has."""
    config = loaded.config.attention
    groups: list[str] = sorted({spec.cache_kind for spec in specs})
    for group in config.groups:
        if group not in groups:
            path = f"attention.backend.groups.{group}"
            raise ConfigError(
                f"{path} ({loaded.where(path)}): the model has no such layers; the groups of its layers: {', '.join(groups)}"
            )
    wishes: dict[AttentionPart, Wish] = {}
    for part in itertools.product(groups, PHASES):
        name, path = config.choice(*part)
        wishes[part] = Wish(name, _source(loaded, path))
    return wishes


def _cache_spec(specs: list[AttentionSpec], attention: AttentionSelection) -> KVCacheSpec:
    groups = tuple(
        CacheGroup(spec=spec, layers=tuple(i for i, other in enumerate(specs) if other == spec))
        for spec in dict.fromkeys(specs)
    )
    return KVCacheSpec(
        groups=groups, block_size=attention.block_size, kv_dtype=attention.kv_dtype, layout=attention.layout
    )


# --- building --------------------------------------------------------------------------------------------------------


def build_engine(loaded: LoadedConfig) -> tuple[EngineCore, Any]:
    """Resolve, load and start. Returns the core and the tokenizer (None for a folder without one and random weights)."""
    return start_engine(explain(loaded))


def start_engine(explanation: Explanation) -> tuple[EngineCore, Any]:
    """Load and start what `explain` chose; the second half of `build_engine`, for whoever times or shows the halves."""
    tokenizer = _load_tokenizer(explanation)
    executor = _start_executor(explanation, _vocab_limit(explanation, tokenizer))
    try:
        return _start_core(explanation, executor, tokenizer), tokenizer
    except BaseException:
        executor.shutdown()
        raise


def _load_tokenizer(explanation: Explanation) -> Any:
    config = explanation.config
    if config.tokenizer is not None:
        return load_tokenizer(resolve_tokenizer(config.tokenizer))
    folder = explanation.files.path
    has_one = explanation.files.kind == "gguf" or any(Path(folder).glob("tokenizer*"))
    if explanation.parts.dummy_seed is not None and not has_one:
        return None
    return load_tokenizer(explanation.files)


def _vocab_limit(explanation: Explanation, tokenizer: Any) -> int:
    """The ids that may be drawn: those behind the tokenizer's last only pad the model's vocabulary (C39)."""
    size = int(explanation.parts.hf_config.vocab_size)
    return size if tokenizer is None else min(size, max(tokenizer.get_vocab().values(), default=size - 1) + 1)


def _start_executor(explanation: Explanation, vocab_limit: int) -> Executor:
    config, loaded = explanation.config, explanation.loaded
    record = explanation.executor.chosen
    assert record is not None
    spec = WorkerSpec(
        config=config,
        resolved=explanation.resolved,
        parts=explanation.parts,
        cache=explanation.cache,
        attention=_backends(explanation),
        processors=tuple(_processor_part(explanation, selection) for selection in explanation.processors),
        vocab_limit=vocab_limit,
    )
    executor = make(
        explanation.executor,
        ExecutorContext(
            make_worker=lambda rank: DeviceWorker(spec, rank),
            world_size=config.parallel.world_size,
            device=explanation.resolved.device,
            max_concurrent_batches=explanation.max_concurrent_batches,
            options=validate_options(record.options, config.executor.options, "executor.options", loaded.where),
        ),
        Executor,  # type: ignore[type-abstract]
    )
    try:
        executor.start()
    except BaseException:
        executor.shutdown()
        raise
    return executor


def _backends(explanation: Explanation) -> dict[AttentionPart, tuple[Any, BaseModel]]:
    """Factory and options of each part's backend. Where several are used, options stand under their names."""
    attention, where = explanation.attention, explanation.loaded.where
    options, path = explanation.config.attention.options, "attention.options"
    records = attention.records
    if len(records) == 1:
        checked = {name: validate_options(record.options, options, path, where) for name, record in records.items()}
    else:
        for name in options:
            if name not in records:
                raise ConfigError(
                    f"{path}.{name} ({where(f'{path}.{name}')}): attention uses {' and '.join(sorted(records))}, so "
                    f"options stand under a backend's name.{did_you_mean(name, records)}"
                )
        checked = {
            name: validate_options(record.options, options.get(name, {}), f"{path}.{name}", where)
            for name, record in records.items()
        }
    chosen = {part: attention.record(part) for part in attention.parts}
    return {part: (record.factory, checked[record.name]) for part, record in chosen.items()}


def _processor_part(explanation: Explanation, selection: Selection) -> ProcessorPart:
    record, loaded = selection.chosen, explanation.loaded
    assert isinstance(record, LogitsProcessorRecord)
    options = explanation.config.sampler.options.get(record.name, {})
    path = f"sampler.options.{record.name}"
    return ProcessorPart(record=record, options=validate_options(record.options, options, path, loaded.where))


def _start_core(explanation: Explanation, executor: Executor, tokenizer: Any) -> EngineCore:
    config = explanation.config
    num_blocks, pool_why = _pool_blocks(explanation, executor)
    resolved = explanation.resolved
    resolved = replace(resolved, num_kv_blocks=num_blocks, why={**resolved.why, **pool_why})
    depth = min(explanation.max_concurrent_batches, executor.max_concurrent_batches)
    kv = KVCacheCoordinator(
        windows=[group.spec.window for group in explanation.cache.groups],
        block_size=resolved.block_size,
        num_blocks=num_blocks,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=resolved.max_model_len,
        prefix_caching=config.cache.prefix_caching,
        max_tokens_in_flight=resolved.max_num_batched_tokens * depth,
    )
    if not kv.fits(resolved.max_model_len):
        resolved = _fit_length(explanation, resolved, kv)
    executor.initialize_kv_cache(num_blocks)
    info = EngineInfo(
        config=config,
        sources=explanation.loaded.sources,
        resolved=resolved,
        selections=explanation.selections,
        vocab_size=explanation.parts.hf_config.vocab_size,
        eos_token_ids=eos_token_ids(explanation.files, explanation.parts.hf_config, tokenizer),
    )
    observers = explanation.loader.observers(identities(explanation.selections))
    return EngineCore(info, executor, _scheduler(explanation, resolved, kv, depth), kv, depth, observers)


def _fit_length(explanation: Explanation, resolved: ResolvedConfig, kv: KVCacheCoordinator) -> ResolvedConfig:
    """Shorten max_model_len to what the pool holds; a length that was written is never shortened.

    Where the number of blocks was written as well, both are the operator's: longer requests are refused one by one (C21).
    """
    config, longest = explanation.config, kv.longest
    if config.max_model_len != "auto":
        if config.cache.num_blocks == "auto":
            raise MemoryBudgetError(_too_long(explanation, kv))
        return resolved
    if longest == 0:
        groups = len(explanation.cache.groups)
        raise MemoryBudgetError(
            f"the KV pool has {kv.num_blocks} block(s), but a request needs one in each of the model's {groups} cache "
            "groups; raise cache.num_blocks, cache.memory_bytes or cache.gpu_memory_utilization"
        )
    # One truth for admission and the listing (C7): what a single request can really hold.
    why = {**resolved.why, "max_model_len": "tokens that the whole KV pool holds"}
    return replace(resolved, max_model_len=longest, why=why)


def _too_long(explanation: Explanation, kv: KVCacheCoordinator) -> str:
    """Why a request of max_model_len fits no empty pool, and each thing that would help."""
    config, resolved, cache = explanation.config, explanation.resolved, explanation.cache
    itemsize = torch_dtype(resolved.kv_dtype).itemsize
    block_bytes = cache.block_bytes(itemsize)
    needed = sum(m.needed_on(resolved.max_model_len, 0, 0) for m in kv.managers)
    ways = [f"max_model_len at most {kv.longest} (auto fits it)"] if kv.longest else []
    if config.cache.memory_bytes != "auto":
        ways.append(f"cache.memory_bytes {(needed + 1) * block_bytes} or more")
    elif resolved.device == "cuda":
        ways.append(f"a cache.gpu_memory_utilization above {config.cache.gpu_memory_utilization}")
        ways.append(f"a scheduler.max_num_batched_tokens below {resolved.max_num_batched_tokens}")
    else:
        ways.append(f"cache.memory_bytes {(needed + 1) * block_bytes}, if the host has them")
    if itemsize > 1 and all(FP8 in record.kv_dtypes for record in explanation.attention.records.values()):
        ways.append("cache.dtype fp8")
    return (
        f"max_model_len ({explanation.loaded.where('max_model_len')}): a request of {resolved.max_model_len} tokens takes "
        f"{needed} KV blocks of {block_bytes} bytes, {needed * block_bytes} in all, but the pool has {kv.num_blocks}, "
        f"{kv.num_blocks * block_bytes} bytes, and holds one of {kv.longest} tokens. What would work: {'; '.join(ways)}"
    )


def _pool_blocks(explanation: Explanation, executor: Executor) -> tuple[int, dict[str, str]]:
    """Blocks of the pool, the null block included, and why there are so many where nobody wrote it."""
    config, resolved, cache = explanation.config, explanation.resolved, executor.kv_cache_spec()
    if config.cache.num_blocks != "auto":
        return config.cache.num_blocks + 1, {}
    per_request = -(-resolved.max_model_len // resolved.block_size) * len(cache.groups)
    wanted = per_request * config.scheduler.max_num_seqs
    available = executor.available_kv_memory()
    num_blocks = num_kv_blocks(
        available,
        cache.block_bytes(torch_dtype(resolved.kv_dtype).itemsize),
        resolved.max_model_len,
        resolved.block_size,
        wanted=wanted,
    )
    budgets = [budget for budget in executor.collective_rpc("kv_budget") if budget is not None]
    measured = str(min(budgets, key=lambda b: b.pool)) if budgets else f"{available} bytes for the pool"
    enough = f"; {config.scheduler.max_num_seqs} requests of max_model_len take no more" if num_blocks > wanted else ""
    return num_blocks, {"num_kv_blocks": measured + enough}


def _scheduler(explanation: Explanation, resolved: ResolvedConfig, kv: KVCacheCoordinator, depth: int) -> Scheduler:
    config = explanation.config.scheduler
    record = explanation.scheduler.chosen
    assert isinstance(record, SchedulerRecord)
    context = SchedulerContext(
        kv=kv,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_model_len=resolved.max_model_len,
        chunked_prefill=config.chunked_prefill,
        max_prefill_tokens=None if config.max_prefill_tokens == "auto" else config.max_prefill_tokens,
        max_concurrent_batches=depth,
        policy=None,
        options=validate_options(record.options, config.options, "scheduler.options", explanation.loaded.where),
    )
    if record.depth == "scheduler":
        return make(explanation.scheduler, context, Scheduler)  # type: ignore[type-abstract]
    policy = make(explanation.scheduler, context, SchedulingPolicy)  # type: ignore[type-abstract]
    return TokenBudgetScheduler(replace(context, policy=policy))
