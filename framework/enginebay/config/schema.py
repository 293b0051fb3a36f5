"""The configuration tree: one frozen pydantic model a bay. It says what may be written, not what a machine makes of it.

It knows no file, environment or command line (`enginebay.config.sources`), no plugin's own options (each record has a
model of them) and no hardware (`enginebay.config.resolved`). Values are strict: ``"8"`` is not 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

Auto = Literal["auto"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
CacheDtype = Dtype | Literal["fp8"]
Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
PositiveInt = Annotated[int, Field(ge=1)]
AutoOrPositive = Auto | PositiveInt
Name = Annotated[str, Field(min_length=1)]

#: What ``scheduler.max_num_batched_tokens: auto`` means on each device type, in tokens a step.
AUTO_BATCHED_TOKENS: Mapping[str, int] = {"cuda": 8192, "cpu": 2048}


class Section(BaseModel):
    """Base of every part of the tree: frozen, strict, and every unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


def _shape_of(value: Any) -> str:
    """Tag of a value that is either a word or a mapping, so that errors speak of the form that was written."""
    return "map" if isinstance(value, Mapping | BaseModel) else "word"


class PhaseOverrides(Section):
    """Attention backends of one group of layers by phase; what is left out follows `attention.backend`."""

    prefill: Name | None = None
    """Backend of the group's rows that compute more than one token."""
    decode: Name | None = None
    """Backend of the group's rows that compute one token."""


GroupChoice = Annotated[Annotated[Name, Tag("word")] | Annotated[PhaseOverrides, Tag("map")], Discriminator(_shape_of)]


class GroupBackends(Section):
    """Attention backends chosen by the kind of cache that layers have; what is left out follows `attention.backend`."""

    full: GroupChoice | None = None
    """Backend of layers that see all tokens: a name, "auto", or a mapping with `prefill` and `decode`."""
    sliding: GroupChoice | None = None
    """The same for layers with a sliding window."""


class PhaseBackends(Section):
    """Attention backends chosen by phase, and by group of layers."""

    prefill: Name = "auto"
    """Backend of rows that compute more than one token."""
    decode: Name = "auto"
    """Backend of rows that compute one token."""
    groups: GroupBackends = GroupBackends()
    """Other backends for single groups of layers."""


BackendChoice = Annotated[Annotated[Name, Tag("word")] | Annotated[PhaseBackends, Tag("map")], Discriminator(_shape_of)]


class AttentionConfig(Section):
    """The attention bay."""

    backend: BackendChoice = "auto"
    """A backend's name, "auto", or a mapping with `prefill`, `decode` and `groups`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The chosen backend's own options; where several are chosen, under the name of each."""

    def choice(self, group: str, phase: str) -> tuple[str, str]:
        """The backend of a group's phase as written, and the dotted path that says it."""
        path = "attention.backend"
        if not isinstance(self.backend, PhaseBackends):
            return self.backend, path
        of_group: Name | PhaseOverrides | None = getattr(self.backend.groups, group)
        if isinstance(of_group, str):
            return of_group, f"{path}.groups.{group}"
        if of_group is not None and (name := getattr(of_group, phase)) is not None:
            return name, f"{path}.groups.{group}.{phase}"
        return getattr(self.backend, phase), f"{path}.{phase}"

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups of layers that have a choice of their own."""
        if not isinstance(self.backend, PhaseBackends):
            return ()
        return tuple(name for name, choice in self.backend.groups if choice is not None)


class ExecutorConfig(Section):
    """The executor bay: where workers live."""

    backend: Name = "auto"
    """An executor's name, or "auto"."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The chosen executor's own options."""


class ParallelConfig(Section):
    """How the model is cut over ranks. The resolver refuses executors that cannot run that many."""

    tensor: PositiveInt = 1
    """Ranks that share each layer."""
    pipeline: PositiveInt = 1
    """Ranks that hold consecutive layers."""

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tensor * self.pipeline


class SchedulerConfig(Section):
    """The scheduler bay: which requests run, and how much of them a step computes."""

    policy: Name = "auto"
    """A scheduling policy's or a whole scheduler's name, or "auto"."""
    max_num_seqs: PositiveInt = 256
    """Most requests that run at once."""
    max_num_batched_tokens: AutoOrPositive = "auto"
    """Most tokens a step computes; "auto" is 8192 on cuda and 2048 on cpu."""
    max_prefill_tokens: AutoOrPositive = "auto"
    """Most prompt tokens in a step that also decodes, so that a flood of prompts does not stall running requests; "auto"
    lets prompts take what is left of max_num_batched_tokens. With chunked_prefill off, a longer prompt waits until nothing
    decodes."""
    chunked_prefill: bool = True
    """Spread a prompt over several steps where it does not fit one. When false, a prompt runs in one step."""
    async_scheduling: bool = True
    """Schedule the next step while the current one runs."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The chosen policy's or scheduler's own options."""


class SamplerConfig(Section):
    """The sampler bay."""

    processors: Annotated[tuple[Name, ...], Field(strict=False)] = ()
    """Logits processors to run besides the built-in ones, in this order."""
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of the processors, under their names."""
    logprobs_mode: Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"] = "raw_logprobs"
    """What `logprobs` returns: of the model's own logits, or of those that remain after processors, temperature and
    filters; as log-probabilities or as logits."""


class QuantConfig(Section):
    """The quantization bay, where the checkpoint does not say it itself."""

    method: Name
    """A quantization method's name."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The method's own options."""


QuantChoice = Annotated[Annotated[Auto, Tag("word")] | Annotated[QuantConfig, Tag("map")], Discriminator(_shape_of)]


class CacheConfig(Section):
    """The KV cache."""

    block_size: AutoOrPositive = "auto"
    """Tokens a block; "auto" takes one that every attention backend reads."""
    dtype: CacheDtype = "auto"
    """Dtype of cached keys and values; "auto" is the model's, "fp8" the 8-bit float e4m3."""
    key_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """What keys are divided by before they are rounded to fp8, so that they stay within ±448."""
    value_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """The same for values."""
    prefix_caching: bool = True
    """Reuse the cached keys and values of a common prefix."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the GPU's memory that weights, activations and cache may take together; not used on cpu."""
    num_blocks: AutoOrPositive = "auto"
    """Blocks of the pool; "auto" derives them from memory."""
    memory_bytes: AutoOrPositive = "auto"
    """Bytes of the pool; "auto" is what gpu_memory_utilization leaves on cuda, a share of host memory on cpu."""


class GraphsConfig(Section):
    """CUDA graphs of decode steps."""

    decode_sizes: Annotated[tuple[PositiveInt, ...], Field(strict=False)] = ()
    """Batch sizes at which decode steps are captured; empty runs them eagerly."""


class EngineConfig(Section):
    """Everything that a user may choose about an engine, as written: "auto" is still "auto" here."""

    model: Name = "smollm2-135m-instruct"
    """A packaged model's name, a folder, a .gguf file, or a Hugging Face id."""
    tokenizer: Name | None = None
    """Folder or Hugging Face id of the tokenizer; null takes the model's."""
    dtype: Dtype = "auto"
    """Compute dtype of weights and activations."""
    device: Device = "auto"
    """Device type to run on; "auto" takes cuda where there is one."""
    max_model_len: AutoOrPositive = "auto"
    """Most tokens of a request, prompt and output together; "auto" is the model's own limit where memory allows."""
    load_format: LoadFormat = "auto"
    """Format of the checkpoint; "dummy" draws random weights and reads none."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the random weights of load_format "dummy". Sampling has a seed of its own in each request."""
    plugins: Annotated[tuple[Name, ...], Field(strict=False)] = ()
    """Local plugin files to load besides the installed ones; relative to the YAML file that names them."""
    attention: AttentionConfig = AttentionConfig()
    """The attention bay."""
    executor: ExecutorConfig = ExecutorConfig()
    """The executor bay."""
    parallel: ParallelConfig = ParallelConfig()
    """Ranks."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """The scheduler bay."""
    sampler: SamplerConfig = SamplerConfig()
    """The sampler bay."""
    quant: QuantChoice = "auto"
    """Quantization: "auto" follows the checkpoint, or a mapping with `method`."""
    cache: CacheConfig = CacheConfig()
    """The KV cache."""
    graphs: GraphsConfig = GraphsConfig()
    """CUDA graphs."""
    compile: Literal["none"] = "none"
    """Compiler of the model; only "none" so far."""
