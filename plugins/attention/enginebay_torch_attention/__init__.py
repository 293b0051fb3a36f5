"""The ``torch`` attention backend: paged attention in plain PyTorch operations, for CPU and CUDA.

It is the backend that always works: any head size, block size and cache layout with contiguous heads, sliding
windows, soft caps and sinks, in float32, bfloat16 and float16, over caches of these and of fp8. This module is the record
only; it imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginebay.plugins.hookspecs import hookimpl
from enginebay.plugins.records import HND, NHD, AttentionRecord
from enginebay.plugins.requirements import FP8

if TYPE_CHECKING:
    from enginebay.interfaces.attention import AttentionBackend, AttentionContext

_DTYPES = ("float32", "bfloat16", "float16")


def make(context: AttentionContext) -> AttentionBackend:
    """Build the backend of one plan group and phase."""
    from enginebay_torch_attention.backend import TorchAttention

    return TorchAttention(context)


RECORD = AttentionRecord(
    name="torch",
    summary="paged attention in plain PyTorch, on CPU and CUDA",
    factory=make,
    api_version=0,
    dtypes=_DTYPES,
    kv_dtypes=(*_DTYPES, FP8),
    layouts=(NHD, HND),
    kernel_blocks=(1,),
    window=True,
    soft_cap=True,
    sinks=True,
    host_lens="upper_bound",
    graph_support="single_token_decode",
)


@hookimpl
def enginebay_attention_backends() -> list[AttentionRecord]:
    """Provide the record."""
    return [RECORD]
