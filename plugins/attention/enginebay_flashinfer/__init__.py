"""The ``flashinfer`` attention backend: FlashInfer's paged kernels for NVIDIA GPUs, planned on the host.

Decode runs on tensor cores (fa2) and can be captured in CUDA graphs; prefill runs fa3 on Hopper and fa2 elsewhere, and over
an fp8 cache. This module is the record only; it imports neither torch nor FlashInfer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from enginebay.plugins.hookspecs import hookimpl
from enginebay.plugins.records import HND, NHD, AttentionRecord
from enginebay.plugins.requirements import FP8, Reason, Requirements, mixed_dtypes
from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from enginebay.interfaces.attention import AttentionBackend, AttentionContext

_DTYPES = ("bfloat16", "float16")


class FlashInferOptions(BaseModel):
    """What YAML may set under ``attention.options`` for this backend."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workspace_bytes: int = Field(default=128 * 2**20, ge=2**20, multiple_of=16)
    """Device memory of one plan group's phase for partial results of split rows; a plan that needs more fails with
    FlashInfer's message."""
    prefill_kernel: Literal["auto", "fa2", "fa3"] = "auto"
    """Kernel of the prefill phase; "auto" takes fa3 on Hopper for long queries, and fa2 elsewhere and over an fp8 cache,
    which fa3 reads for fp8 queries only."""


def make(context: AttentionContext) -> AttentionBackend:
    """Build the backend of one plan group and phase."""
    from enginebay_flashinfer.backend import FlashInferAttention

    return FlashInferAttention(context)


def _check(req: Requirements) -> list[Reason]:
    """The kernels read queries and a 16-bit cache in one dtype."""
    return mixed_dtypes(req, _DTYPES, besides=(FP8,))


RECORD = AttentionRecord(
    name="flashinfer",
    summary="FlashInfer's paged attention kernels, planned on the host",
    factory=make,
    api_version=0,
    requires=("flashinfer",),
    requires_dist=("flashinfer-python>=0.6.14",),
    install="'enginebay[flashinfer]'",
    devices=("cuda",),
    options=FlashInferOptions,
    priority=20,
    check=_check,
    dtypes=_DTYPES,
    kv_dtypes=(*_DTYPES, FP8),
    head_dims=(64, 128, 256),
    layouts=(NHD, HND),
    # The kernels divide token positions by a run-time page size, so any block does.
    kernel_blocks=(1,),
    window=True,
    soft_cap=True,
    host_lens="exact",
    graph_support="single_token_decode",
    min_capability=(8, 0),
)


@hookimpl
def enginebay_attention_backends() -> list[AttentionRecord]:
    """Provide the record."""
    return [RECORD]
