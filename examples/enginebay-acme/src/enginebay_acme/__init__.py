"""What this package offers enginebay: the attention backend ``acme`` and the scheduling policy ``acme_sjf``.

It imports no torch, so that listing plugins stays cheap: each factory imports what it builds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginebay import hookimpl
from enginebay.plugins.records import HND, NHD, AttentionRecord, SchedulerRecord

from enginebay_acme.options import AttentionOptions, PolicyOptions

if TYPE_CHECKING:
    from enginebay.interfaces.attention import AttentionBackend, AttentionContext
    from enginebay.interfaces.scheduler import SchedulerContext, SchedulingPolicy

DTYPES = ("float32", "bfloat16", "float16")


def make_attention(context: AttentionContext) -> AttentionBackend:
    """Build the backend of one group of layers and phase."""
    from enginebay_acme.attention import PaddedAttention

    return PaddedAttention(context)


def make_policy(context: SchedulerContext) -> SchedulingPolicy:
    """Build the policy."""
    from enginebay_acme.policy import ShortestJobFirst

    assert isinstance(context.options, PolicyOptions)  # the host read YAML into the record's own model
    return ShortestJobFirst(context.options.tokens_per_arrival)


@hookimpl
def enginebay_attention_backends() -> list[AttentionRecord]:
    """The one backend."""
    return [
        AttentionRecord(
            name="acme",
            summary="attention of some padded rows at once, in plain torch",
            factory=make_attention,
            api_version=0,
            priority=-10,
            options=AttentionOptions,
            devices=("cpu",),
            dtypes=DTYPES,
            kv_dtypes=DTYPES,
            layouts=(NHD, HND),
            kernel_blocks=(1,),
            window=True,
            soft_cap=True,
            sinks=True,
            # the plan's width is `max_seq_len`; how long each row is it reads on the device
            host_lens="upper_bound",
        )
    ]


@hookimpl
def enginebay_schedulers() -> list[SchedulerRecord]:
    """The one policy."""
    return [
        SchedulerRecord(
            name="acme_sjf",
            summary="the shortest job first, and none waits for ever",
            factory=make_policy,
            api_version=0,
            priority=-10,
            options=PolicyOptions,
        )
    ]
