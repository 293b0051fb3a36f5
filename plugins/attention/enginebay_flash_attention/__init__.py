"""The ``flash_attention`` attention backend: FlashAttention-4's CuTe kernels on Hopper.

They are the fastest at prefill, and read a paged cache of any block size through its strides. On Hopper they do not split a
row's keys among blocks of threads, so decode is theirs only where rows alone fill the GPU. This module is the record only;
it imports neither torch nor the library.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Literal

from enginebay.plugins.hookspecs import hookimpl
from enginebay.plugins.records import HND, NHD, AttentionRecord
from enginebay.plugins.requirements import Reason, Requirements, mixed_dtypes
from pydantic import BaseModel, ConfigDict, field_validator

if TYPE_CHECKING:
    from enginebay.interfaces.attention import AttentionBackend, AttentionContext

_DTYPES = ("bfloat16", "float16")
_HOPPER = (9, 0)
#: streaming multiprocessors of an H100 SXM or H200
_NUM_SMS = 132


class FlashAttentionOptions(BaseModel):
    """What YAML may set under ``attention.options`` for this backend."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal["auto", 2, 3, 4] = "auto"
    """FlashAttention's generation; "auto" is 4, the only one that the backend runs."""

    @field_validator("version")
    @classmethod
    def _is_run(cls, version: object) -> object:
        if version in (2, 3):
            raise ValueError(
                f"FlashAttention-{version} is not run by this backend; set version: 4 or auto, or attention.backend: flashinfer"
            )
        return version


def make(context: AttentionContext) -> AttentionBackend:
    """Build the backend of one plan group and phase."""
    from enginebay_flash_attention.backend import FlashAttention

    return FlashAttention(context)


def _check(req: Requirements) -> list[Reason]:
    """sm_90 only; cache in the compute dtype; decode where max_num_seqs x KV heads is at least 132, one a multiprocessor."""
    reasons = []
    if (two := _flash_attention_2()) and not _installed("flash-attn-4"):
        reasons.append(
            Reason(
                code="library",
                detail=f"the installed flash-attn {two} is FlashAttention-2, whose kernels this backend does not run",
                hint="install flash-attn-4 beside it, or use flashinfer or triton",
            )
        )
    capability = req.hardware.capability
    if capability is not None and capability > _HOPPER:
        reasons.append(
            Reason(
                code="capability",
                detail=f"this backend was run on sm_90 only, not on sm_{capability[0]}{capability[1]}",
                hint="use flashinfer or triton",
            )
        )
    reasons.extend(mixed_dtypes(req, _DTYPES))
    if "decode" in req.phases and req.max_num_seqs:
        reasons.extend(
            _idle(req.max_num_seqs, spec.num_kv_heads) for spec in req.attention if _is_idle(req, spec.num_kv_heads)
        )
    return list(dict.fromkeys(reasons))


def _is_idle(req: Requirements, num_kv_heads: int) -> bool:
    """Whether the largest decode step leaves multiprocessors without work."""
    return req.max_num_seqs * num_kv_heads < _NUM_SMS


def _idle(rows: int, num_kv_heads: int) -> Reason:
    return Reason(
        code="decode_occupancy",
        detail=(
            f"on Hopper a row's keys are read by one thread block a KV head: {rows} rows x {num_kv_heads} KV heads are "
            f"{rows * num_kv_heads} blocks for {_NUM_SMS} multiprocessors"
        ),
        hint="set attention.backend.decode: flashinfer or triton, or raise scheduler.max_num_seqs",
    )


def _installed(distribution: str) -> str:
    """The version of an installed distribution; empty if there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _flash_attention_2() -> str:
    """The version of the older library, which shares the ``flash_attn`` package's name; empty if there is none."""
    return _installed("flash-attn")


RECORD = AttentionRecord(
    name="flash_attention",
    summary="FlashAttention-4's paged prefill kernels, for Hopper",
    factory=make,
    api_version=0,
    # `flash_attn` may be FlashAttention-2's package, and finding a module below it would import that
    requires=("cutlass",),
    requires_dist=("flash-attn-4==4.0.0b36",),
    install="'enginebay[flash-attn]'",
    devices=("cuda",),
    options=FlashAttentionOptions,
    priority=15,
    phase_priority={"prefill": 30},
    check=_check,
    dtypes=_DTYPES,
    kv_dtypes=_DTYPES,
    # Paged keys take multiples of 16 up to 256; these are the sizes of models.
    head_dims=(64, 96, 128, 192, 256),
    layouts=(NHD, HND),
    # The kernels divide token positions by a run-time page size, so any block does.
    kernel_blocks=(1,),
    window=True,
    soft_cap=True,
    sinks=True,
    host_lens="none",
    graph_support="single_token_decode",
    min_capability=_HOPPER,
)


@hookimpl
def enginebay_attention_backends() -> list[AttentionRecord]:
    """Provide the record."""
    return [RECORD]
