"""What would run, and why: every bay filled from a configuration, in titled stages, before anything is loaded.

Choices are the resolver's; this gives it facts. Building what was chosen is `enginebay.engine.assembly`'s.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from enginebay.config import AUTO_BATCHED_TOKENS, EngineConfig, LoadedConfig, ResolvedConfig, validate_options
from enginebay.engine.hardware import choose_dtype, detect
from enginebay.errors import ConfigError
from enginebay.interfaces.batch import torch_dtype
from enginebay.interfaces.executor import CacheGroup, KVCacheSpec
from enginebay.interfaces.quant import QuantContext
from enginebay.layers.rotary import position_limit
from enginebay.loading.hf_config import load_hf_config
from enginebay.models.reference import ModelFiles, resolve_model
from enginebay.plugins.attention import Wish, resolve_attention
from enginebay.plugins.loader import PluginLoader
from enginebay.plugins.records import LogitsProcessorRecord, Phase
from enginebay.plugins.requirements import FP8, AttentionSpec, Hardware, Requirements
from enginebay.plugins.resolver import resolve
from enginebay.plugins.selection import ASYNC_SCHEDULING, AttentionPart, AttentionSelection, Selection, switched_off
from enginebay.plugins.suggest import did_you_mean
from enginebay.worker.model_loader import ModelParts, build_model
from enginebay.worker.worker import ProcessorPart

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
        off = any(s.feature == ASYNC_SCHEDULING for s in switched_off(self.selections))
        if off or not self.config.scheduler.async_scheduling:
            return 1
        return int(getattr(self.executor.chosen, "max_concurrent_batches", 1))


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
    _check_graphs(loaded, hardware)
    _check_scales(loaded)
    _check_fp8(loaded, hardware)
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
    attention_backends(explanation)
    for selection in explanation.processors:
        processor_part(explanation, selection)
    for part, options, path in (
        (explanation.executor, config.executor.options, "executor.options"),
        (explanation.scheduler, config.scheduler.options, "scheduler.options"),
    ):
        assert part.chosen is not None
        validate_options(part.chosen.options, options, path, where)


def _check_graphs(loaded: LoadedConfig, hardware: Hardware) -> None:
    """Refuse graphs that cannot be captured, and such as hold more rows than a step has."""
    sizes, seats = loaded.config.graphs.decode_sizes, loaded.config.scheduler.max_num_seqs
    where = f"graphs.decode_sizes ({loaded.where('graphs.decode_sizes')})"
    if sizes and hardware.device != "cuda":
        raise ConfigError(f"{where}: CUDA graphs need device cuda, not {hardware.device}; set graphs.decode_sizes: []")
    if sizes and max(sizes) > seats:
        raise ConfigError(
            f"{where}: a graph of {max(sizes)} rows, but scheduler.max_num_seqs is {seats}; leave out sizes above that"
        )


def _check_fp8(loaded: LoadedConfig, hardware: Hardware) -> None:
    """Refuse an fp8 cache on GPUs whose compiler has no such numbers: the core's own kernel writes the cache."""
    capability = hardware.capability
    if (
        loaded.config.cache.dtype == "fp8"
        and hardware.device == "cuda"
        and capability is not None
        and capability < (8, 9)
    ):
        raise ConfigError(
            f"cache.dtype ({loaded.where('cache.dtype')}): fp8 needs a GPU of sm_89 or later, and this one is "
            f"sm_{capability[0]}{capability[1]}; set cache.dtype: auto"
        )


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


def attention_backends(explanation: Explanation) -> dict[AttentionPart, tuple[Any, BaseModel]]:
    """Factory and options of each part's backend.

    Where several are used, options stand under their names. A single one's may too, so that a file does not depend on how
    many `auto` takes on a machine.
    """
    attention, where = explanation.attention, explanation.loaded.where
    options, path = explanation.config.attention.options, "attention.options"
    records = attention.records
    under_names = len(records) > 1 or (
        set(options) == set(records) and all(isinstance(o, Mapping) for o in options.values())
    )
    if not under_names:
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


def processor_part(explanation: Explanation, selection: Selection) -> ProcessorPart:
    """A logits processor's record and its checked options."""
    record, loaded = selection.chosen, explanation.loaded
    assert isinstance(record, LogitsProcessorRecord)
    options = explanation.config.sampler.options.get(record.name, {})
    path = f"sampler.options.{record.name}"
    return ProcessorPart(record=record, options=validate_options(record.options, options, path, loaded.where))
