"""Records: what each plugin says of itself, frozen and torch-free, one type a kind.

One record serves the resolver, ``enginebay plugins``, the support matrix and the conformance suite: a capability is
written once, and a false claim fails the suite. A record's factory is a function with the heavy import inside.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict

from enginebay.errors import PluginError
from enginebay.plugins.distributions import check_requirement, distribution_fault
from enginebay.plugins.requirements import AttentionSpec, Reason, Requirements, Support
from enginebay.plugins.suggest import did_you_mean

Kind = Literal["attention", "executor", "model", "quant", "sampler", "scheduler"]
KINDS: tuple[Kind, ...] = ("attention", "executor", "model", "quant", "sampler", "scheduler")

#: The contract's version per kind. 0 until the first release; a record of another version is refused.
API_VERSION: dict[Kind, int] = {"attention": 0, "executor": 0, "model": 0, "quant": 0, "sampler": 0, "scheduler": 0}


class NoOptions(BaseModel):
    """The options of a plugin that has none: every key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, kw_only=True)
class Record:
    """What every kind of record has.

    Raises
    ------
    PluginError
        An entry of `requires_dist` is no PEP 508 requirement.
    """

    kind: ClassVar[Kind]

    #: the word written in YAML; equals the entry point's name
    name: str
    #: one line for people
    summary: str
    #: builds the part; its argument is the kind's context object. The heavy import belongs inside.
    factory: Callable[[Any], Any]
    #: the version of the kind's contract that the plugin was written for
    api_version: int
    #: importable modules that the part needs, e.g. ``("flashinfer",)``
    requires: tuple[str, ...] = ()
    #: distributions that the part needs, as PEP 508 requirements, e.g. ``("flashinfer-python>=0.6.14",)``
    requires_dist: tuple[str, ...] = ()
    #: what to install when something in `requires` is missing, or something in `requires_dist` is missing or too old
    install: str = ""
    #: device types that the part runs on
    devices: tuple[str, ...] = ("cpu", "cuda")
    #: pydantic model of the plugin's own options, the ``options:`` of its bay in YAML
    options: type[BaseModel] = NoOptions
    #: among supporting candidates ``auto`` takes the highest; two equal ones are a conflict to be settled in YAML
    priority: int = 0
    #: further reasons against a run that the fields cannot say
    check: Callable[[Requirements], list[Reason]] | None = None
    #: laws of the conformance suite that the part breaks, each with the reason; the suite expects exactly these to fail
    known_failures: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for requirement in self.requires_dist:
            if fault := check_requirement(requirement):
                raise PluginError(f"{self.kind} plugin {self.name}: requires_dist: {fault}")

    def priority_for(self, req: Requirements) -> float:
        """What ``auto`` compares for `req`."""
        return self.priority

    def supports(self, req: Requirements) -> Support:
        """Answer whether this part can serve `req`, with every reason against it."""
        reasons: list[Reason] = []
        missing = [m for m in self.requires if not importable(m)]
        if missing:
            reasons.append(
                Reason(
                    code="missing_module",
                    wanted=", ".join(missing),
                    allowed="installed modules",
                    hint=f"pip install {self.install or ' '.join(missing)}",
                )
            )
        for requirement in self.requires_dist:
            if fault := distribution_fault(requirement):
                hint = f"pip install {self.install or repr(requirement)}"
                reasons.append(Reason(code="distribution", detail=fault, hint=hint))
        if req.hardware.device not in self.devices:
            reasons.append(Reason(code="device", wanted=req.hardware.device, allowed=", ".join(self.devices)))
        reasons.extend(self._capability_reasons(req))
        if self.check is not None:
            reasons.extend(self.check(req))
        return Support.of(reasons)

    def _capability_reasons(self, req: Requirements) -> list[Reason]:
        """Reasons from the kind's own capability fields."""
        return []


def importable(module: str) -> bool:
    """Whether a module is installed; a top-level one is not imported to find out."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


# --- attention -------------------------------------------------------------------------------------------------------

#: The logical order in which every part sees a KV cache tensor, whatever its memory order.
CANONICAL_AXES = ("blocks", "kv", "block", "kv_heads", "head_dim")


@dataclass(frozen=True)
class KVLayout:
    """A KV cache's order in memory: `axes` lists `CANONICAL_AXES` from slowest to fastest.

    The core allocates a contiguous tensor in this order and hands out a view permuted to the canonical order, so that
    layouts differ in strides only. ``NHD`` keeps a token's heads together, ``HND`` a head's tokens.
    """

    name: str
    axes: tuple[str, str, str, str, str]


NHD = KVLayout("NHD", CANONICAL_AXES)
HND = KVLayout("HND", ("blocks", "kv", "kv_heads", "block", "head_dim"))

GraphSupport = Literal["never", "single_token_decode", "uniform", "always"]
HostLens = Literal["none", "upper_bound", "exact"]
Phase = Literal["decode", "prefill"]


@dataclass(frozen=True, kw_only=True)
class AttentionRecord(Record):
    """An attention backend's capabilities. Everything undeclared is refused by the resolver.

    Raises
    ------
    PluginError
        `phase_priority` names no phase.
    """

    kind: ClassVar[Kind] = "attention"

    #: overrides `priority` for single phases, e.g. ``{"prefill": 30}``
    phase_priority: Mapping[Phase, int] = field(default_factory=dict, hash=False)

    #: what the backend serves: decode rows, extend and prefill rows, or both
    phases: tuple[Phase, ...] = ("decode", "prefill")
    #: compute dtypes, e.g. ``("float32", "bfloat16")``
    dtypes: tuple[str, ...]
    #: dtypes of the cache, likewise; ``"float8_e4m3fn"`` is fp8
    kv_dtypes: tuple[str, ...]
    #: supported head sizes; None: any
    head_dims: tuple[int, ...] | None = None
    #: KV layouts by preference
    layouts: tuple[KVLayout, ...] = (NHD,)
    #: the kernel's block: a cache block must be a multiple of one of these
    kernel_blocks: tuple[int, ...] = (16,)
    #: whether it honours `AttentionSpec.window`
    window: bool = False
    #: whether it honours `AttentionSpec.soft_cap`
    soft_cap: bool = False
    #: whether it honours `AttentionLayer.sinks`
    sinks: bool = False
    #: what of the sequence lengths `plan` reads on the host
    host_lens: HostLens = "none"
    #: the steps that may be captured in a CUDA graph
    graph_support: GraphSupport = "never"
    #: least CUDA compute capability; None: any
    min_capability: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for phase in self.phase_priority:
            if phase not in get_args(Phase):
                raise PluginError(
                    f"attention plugin {self.name}: phase_priority: {phase!r} is not a phase; phases: "
                    f"{', '.join(get_args(Phase))}.{did_you_mean(str(phase), get_args(Phase))}"
                )

    def phase_priorities(self) -> dict[str, int]:
        """The priority in each phase that the backend serves."""
        return {phase: self.phase_priority.get(phase, self.priority) for phase in self.phases}

    def priority_for(self, req: Requirements) -> float:
        """The mean over the phases asked for."""
        by_phase = self.phase_priorities()
        return sum(by_phase.get(phase, self.priority) for phase in req.phases) / len(req.phases)

    def kv_layouts(self, spec: AttentionSpec) -> tuple[KVLayout, ...]:
        """Layouts that the backend takes for `spec`, most wanted first."""
        return self.layouts

    def _capability_reasons(self, req: Requirements) -> list[Reason]:
        out: list[Reason] = []

        def deny(code: str, wanted: object, allowed: object, hint: str = "") -> None:
            out.append(Reason(code=code, wanted=str(wanted), allowed=str(allowed), hint=hint))

        for phase in req.phases:
            if phase not in self.phases:
                deny("phase", phase, ", ".join(self.phases), f"name another backend for attention.backend.{phase}")
        if req.dtype not in self.dtypes:
            deny("dtype", req.dtype, ", ".join(self.dtypes))
        if req.kv_dtype not in self.kv_dtypes:
            deny("kv_dtype", req.kv_dtype, ", ".join(self.kv_dtypes), "set cache.dtype")
        if req.block_size is not None and all(req.block_size % k for k in self.kernel_blocks):
            blocks = " or of ".join(map(str, self.kernel_blocks))
            deny("block_size", req.block_size, f"multiples of {blocks}", "set cache.block_size")
        cap = req.hardware.capability
        if self.min_capability is not None and cap is not None and cap < self.min_capability:
            deny("capability", f"sm_{cap[0]}{cap[1]}", f">= sm_{self.min_capability[0]}{self.min_capability[1]}")
        if req.graphs and self.graph_support == "never" and "decode" in req.phases:
            deny("graphs", "captured decode steps", "eager steps", "set graphs.decode_sizes: []")
        for spec in req.attention:
            if self.head_dims is not None and spec.head_dim not in self.head_dims:
                deny("head_dim", spec.head_dim, ", ".join(map(str, self.head_dims)))
            if spec.window is not None and not self.window:
                hint = "name another backend for attention.backend.groups.sliding"
                deny("window", f"sliding window {spec.window}", "full attention", hint)
            if spec.soft_cap is not None and not self.soft_cap:
                deny("soft_cap", f"logit soft cap {spec.soft_cap}", "no soft cap")
            if spec.sinks and not self.sinks:
                deny("sinks", "attention sinks", "no sinks")
        return list(dict.fromkeys(out))


# --- the other kinds -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ExecutorRecord(Record):
    """A process layout."""

    kind: ClassVar[Kind] = "executor"

    #: largest number of ranks (tensor x pipeline); None: any
    max_world_size: int | None = None
    #: steps that may be in flight at once; 1 switches asynchronous scheduling off, and the report says so
    max_concurrent_batches: int = 2

    def _capability_reasons(self, req: Requirements) -> list[Reason]:
        world = req.tensor_parallel * req.pipeline_parallel
        if self.max_world_size is not None and world > self.max_world_size:
            return [
                Reason(
                    code="world_size",
                    wanted=f"tensor {req.tensor_parallel} x pipeline {req.pipeline_parallel}",
                    allowed=f"at most {self.max_world_size} rank(s)",
                    hint="set parallel.tensor and parallel.pipeline to 1",
                )
            ]
        return []


@dataclass(frozen=True, kw_only=True)
class SchedulerRecord(Record):
    """A scheduling policy, or a whole scheduler (`depth`)."""

    kind: ClassVar[Kind] = "scheduler"

    #: ``"policy"``: the factory returns a `SchedulingPolicy`; ``"scheduler"``: a `Scheduler`
    depth: Literal["policy", "scheduler"] = "policy"
    #: False switches asynchronous scheduling off for the run, and the report says so
    async_scheduling: bool = True


@dataclass(frozen=True, kw_only=True)
class QuantRecord(Record):
    """A quantization method."""

    kind: ClassVar[Kind] = "quant"

    #: values of ``quantization_config.quant_method`` (or ``"gguf"``) that this plugin loads
    checkpoint_methods: tuple[str, ...] = ()
    #: compute dtypes
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    #: gives `enginebay.interfaces.quant_sample.QuantSample`s over all that the plugin reads: what the conformance suite makes
    #: its checkpoints of. The heavy import belongs inside.
    samples: Callable[[], Iterable[Any]] | None = None

    def _capability_reasons(self, req: Requirements) -> list[Reason]:
        out = []
        if req.quant_method not in self.checkpoint_methods:
            out.append(
                Reason(
                    code="quant_method",
                    wanted=req.quant_method or "plain weights",
                    allowed=", ".join(self.checkpoint_methods) or "none",
                )
            )
        if req.dtype not in self.dtypes:
            out.append(Reason(code="dtype", wanted=req.dtype, allowed=", ".join(self.dtypes)))
        return out


@dataclass(frozen=True, kw_only=True)
class ModelRecord(Record):
    """A model family; `name` is the architecture as Hugging Face names it."""

    kind: ClassVar[Kind] = "model"

    #: largest tensor-parallel size; None: any that divides its heads
    max_tensor_parallel: int | None = None
    #: gives a Hugging Face configuration of a tiny model (100 tokens or more, 64 positions or more) for the conformance suite:
    #: for architectures that the suite's own sizes do not make small, or that transformers does not have under this name.
    #: The heavy import belongs inside.
    tiny_config: Callable[[], Any] | None = None

    def _capability_reasons(self, req: Requirements) -> list[Reason]:
        out = []
        if req.architecture != self.name:
            out.append(Reason(code="architecture", wanted=req.architecture, allowed=self.name))
        most = self.max_tensor_parallel
        if most is not None and req.tensor_parallel > most:
            hint = f"set parallel.tensor to at most {most}"
            wanted = f"tensor {req.tensor_parallel}"
            out.append(Reason(code="tensor_parallel", wanted=wanted, allowed=f"at most {most}", hint=hint))
        return out


#: ``logits``: before temperature, where greedy rows see it too; ``scaled``: after temperature, on sampled rows only
SamplerStage = Literal["logits", "scaled"]


@dataclass(frozen=True, kw_only=True)
class LogitsProcessorRecord(Record):
    """A logits processor. Those named in ``sampler.processors`` run in that order, after the built-in ones of their stage.

    Raises
    ------
    PluginError
        Stage ``scaled`` without `argmax_invariant`: greedy rows would never see the processor.
    """

    kind: ClassVar[Kind] = "sampler"

    #: when it runs: before temperature, or after
    stage: SamplerStage = "logits"
    #: whether the likeliest token stays the likeliest; then greedy rows skip the processor
    argmax_invariant: bool = False
    #: pydantic model of what a request may say to it, in ``SamplingParams.extra_args[name]``; the processor is told what the
    #: model made of it, defaults included. ``Field(examples=[...])`` are what the conformance suite says
    request_options: type[BaseModel] = NoOptions

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stage == "scaled" and not self.argmax_invariant:
            raise PluginError(
                f"logits processor {self.name}: stage 'scaled' needs argmax_invariant=True, since greedy rows skip that "
                "stage; use stage='logits'"
            )


#: the record type of each kind
RECORD_TYPES: dict[Kind, type[Record]] = {
    "attention": AttentionRecord,
    "executor": ExecutorRecord,
    "model": ModelRecord,
    "quant": QuantRecord,
    "sampler": LogitsProcessorRecord,
    "scheduler": SchedulerRecord,
}
