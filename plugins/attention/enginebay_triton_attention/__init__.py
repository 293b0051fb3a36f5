"""The ``triton`` attention backend: enginebay's own paged kernels for NVIDIA GPUs, planned on the device.

Decode splits long rows among the GPU's multiprocessors by a plan that one small kernel makes from the lengths on the
device, so that nothing is read on the host and a captured step serves any lengths. Prefill serves whole prompts, chunks
behind a context and short extensions in one kernel. This module is the record only; it imports neither torch nor Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginebay.plugins.hookspecs import hookimpl
from enginebay.plugins.records import HND, NHD, AttentionRecord
from enginebay.plugins.requirements import FP8, Reason, Requirements, mixed_dtypes

if TYPE_CHECKING:
    from enginebay.interfaces.attention import AttentionBackend, AttentionContext

_DTYPES = ("bfloat16", "float16")


def make(context: AttentionContext) -> AttentionBackend:
    """Build the backend of one plan group and phase."""
    from enginebay_triton_attention.backend import TritonAttention

    return TritonAttention(context)


def _check(req: Requirements) -> list[Reason]:
    """A 16-bit cache has the compute dtype; an fp8 cache needs sm_89 or later."""
    reasons = mixed_dtypes(req, _DTYPES, besides=(FP8,))
    capability = req.hardware.capability
    if req.kv_dtype == FP8 and capability is not None and capability < (8, 9):
        reasons.append(
            Reason(
                code="kv_dtype",
                wanted=f"{FP8} on sm_{capability[0]}{capability[1]}",
                allowed=f"{FP8} from sm_89 on",
                hint="set cache.dtype: auto",
            )
        )
    return reasons


RECORD = AttentionRecord(
    name="triton",
    summary="our own Triton kernels, planned on the device",
    factory=make,
    api_version=0,
    requires=("triton",),
    requires_dist=("triton>=3.6",),
    install="'enginebay[triton]'",
    devices=("cuda",),
    priority=10,
    phase_priority={"decode": 25},  # benchmarks/RESULTS.md, "auto"
    check=_check,
    dtypes=_DTYPES,
    kv_dtypes=(*_DTYPES, FP8),
    head_dims=(64, 80, 96, 128, 192, 256),
    layouts=(NHD, HND),
    kernel_blocks=(16,),
    window=True,
    soft_cap=True,
    sinks=True,
    host_lens="none",
    graph_support="single_token_decode",
    min_capability=(8, 0),
)


@hookimpl
def enginebay_attention_backends() -> list[AttentionRecord]:
    """Provide the record."""
    return [RECORD]
