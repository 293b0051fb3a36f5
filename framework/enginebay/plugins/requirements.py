"""What a run demands of its parts, and how a part answers. Plain data: no torch, no plugin.

Dtypes are named as torch names them (``"float32"``, ``"bfloat16"``, ``"float16"``, `FP8`), devices by type (``"cpu"``,
``"cuda"``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

CacheKind = Literal["full", "sliding"]

#: the dtype of a cache that YAML calls fp8
FP8 = "float8_e4m3fn"


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The device that a run uses."""

    #: device type: ``"cpu"`` or ``"cuda"``
    device: str
    #: the product's name, for people
    name: str = ""
    #: CUDA compute capability, e.g. ``(9, 0)``; None on CPU
    capability: tuple[int, int] | None = None
    #: total device memory (host memory on CPU), in bytes
    memory_bytes: int = 0
    #: processor features that dtype choices depend on, e.g. ``avx512_bf16``
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One attention layer's facts, equal for all layers of a *plan group*.

    Layers equal in every field here and in dtype share one cache group, one KV layout and one backend instance a phase.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    #: softmax scale applied to q·k
    scale: float
    #: tokens a query sees, itself included; None: all before it
    window: int | None = None
    #: logits become ``cap * tanh(logits / cap)``; None: no cap
    soft_cap: float | None = None
    #: whether the softmax has a learned sink term per head
    sinks: bool = False

    @property
    def cache_kind(self) -> CacheKind:
        """``"sliding"`` where a window bounds what is read, else ``"full"``."""
        return "full" if self.window is None else "sliding"


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Everything that a choice may depend on. New fields come with defaults, so old plugins keep working."""

    hardware: Hardware
    #: compute dtype of activations
    dtype: str
    #: dtype of the KV cache
    kv_dtype: str
    #: the model's architecture as Hugging Face names it
    architecture: str = ""
    #: distinct attention layer specs of the model
    attention: tuple[AttentionSpec, ...] = ()
    #: the phases that a candidate must serve: ``("decode", "prefill")`` or one of them
    phases: tuple[str, ...] = ("decode", "prefill")
    #: tokens a KV block, when the user fixed it
    block_size: int | None = None
    #: the checkpoint's quantization method, or None for plain weights
    quant_method: str | None = None
    #: the model's Hugging Face configuration as a dictionary
    model_config: dict[str, Any] = field(default_factory=dict)
    max_model_len: int = 0
    max_num_seqs: int = 0
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    #: whether decode steps are to be captured in CUDA graphs
    graphs: bool = False
    async_scheduling: bool = True


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why a candidate does not fit: a stable code for programs, the rest for people."""

    code: str
    wanted: str = ""
    allowed: str = ""
    hint: str = ""
    #: the whole sentence, where wanted and allowed say too little
    detail: str = ""

    def __str__(self) -> str:
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.code}: {self.detail or f'wanted {self.wanted}, allowed {self.allowed}'}{hint}"


def mixed_dtypes(req: Requirements, dtypes: tuple[str, ...], besides: tuple[str, ...] = ()) -> list[Reason]:
    """The reason of a kernel that reads queries and cache in one dtype, where both are of `dtypes` and differ.

    `besides` are dtypes of caches that it takes with any of them.
    """
    if req.dtype not in dtypes or req.kv_dtype not in dtypes or req.kv_dtype == req.dtype:
        return []
    allowed = ", or ".join((f"the compute dtype {req.dtype}", *besides))
    return [Reason(code="kv_dtype", wanted=req.kv_dtype, allowed=allowed, hint="set cache.dtype")]


@dataclass(frozen=True)
class Support:
    """A candidate's answer to `Requirements`."""

    ok: bool
    reasons: tuple[Reason, ...] = ()

    @classmethod
    def of(cls, reasons: list[Reason]) -> Support:
        """Supported exactly when there is no reason against it."""
        return cls(not reasons, tuple(reasons))
