"""The attention bay: a backend mixes tokens across time over a paged KV cache.

There is one backend instance a plan group and phase. Each step the core calls `plan` once, outside any graph, then
`attend` once a layer. The core writes K and V into the cache before `attend`; a backend only reads it.

Shapes: ``T`` tokens of the phase, ``H`` query heads, ``K`` KV heads, ``D`` head size. A cache tensor is seen as
``[blocks, 2, block, K, D]`` (`records.CANONICAL_AXES`) whatever its order in memory; index 0 of the second axis holds keys,
1 values. On CUDA what lies past a row's last token is finite.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from enginebay.errors import PluginError
from enginebay.interfaces.batch import Bucket, PhaseBatch
from enginebay.plugins.records import KVLayout, Phase
from enginebay.plugins.requirements import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class AttentionContext:
    """What a backend's factory is given."""

    spec: AttentionSpec
    #: the cache group whose block table the layers use: ``batch.groups[group]``
    group: int
    phase: Phase
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    #: tokens a cache block
    block_size: int
    layout: KVLayout
    #: most rows, tokens a step, and tokens a row that will ever be seen
    max_num_rows: int
    max_num_tokens: int
    max_model_len: int
    options: BaseModel

    @property
    def max_blocks_per_row(self) -> int:
        """Columns of a block table."""
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """One layer's frozen facts, passed to `attend`. A backend honours all of them, or its record refuses them."""

    index: int
    spec: AttentionSpec
    #: what a cached key, and a cached value, is multiplied by to give the true one; other than 1 with fp8 caches only
    k_scale: float = 1.0
    v_scale: float = 1.0
    #: float32 ``[H]`` where ``spec.sinks``: a logit a head, neither scaled nor capped, that joins the softmax's denominator
    #: (and `lse`) and nothing else
    sinks: Tensor | None = None


class PlanState:
    """What `plan` leaves for `attend`; one a bucket. A backend subclasses it to hold its buffers."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket


class AttentionBackend(ABC):
    """One plan group's attention in one phase."""

    #: on CPU, in the decode phase: whether `attend` computes with `enginebay.kernels` alone and `plan` does nothing, so that
    #: a step's kernel calls may be recorded and run again (`enginebay.kernels.cpu.recording`)
    replayable: bool = False

    def __init__(self, context: AttentionContext) -> None:
        self.context = context

    def make_state(self, bucket: Bucket) -> PlanState:
        """Buffers for steps up to `bucket`; a captured bucket's must keep their addresses."""
        return PlanState(bucket)

    def workspace_bytes(self, bucket: Bucket) -> int:
        """Device memory in bytes that plan and attend take beyond their arguments at `bucket`; counted before the KV pool."""
        return 0

    def plan(self, batch: PhaseBatch, state: PlanState) -> None:  # noqa: B027 - an empty plan is a valid one
        """Prepare a step. Called eagerly once a step and plan group, before the model runs or a graph replays."""

    @abstractmethod
    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        cache: Tensor,
        batch: PhaseBatch,
        state: PlanState,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        """Causal attention of the phase's tokens over their rows' cached tokens, this step's included.

        Parameters
        ----------
        layer
            The layer's facts.
        query
            ``[T, H, D]``, in the context's dtype.
        cache
            ``[blocks, 2, block, K, D]``, in the context's kv_dtype, strides as the layout says.
        batch, state
            What `plan` saw.
        out
            ``[T, H, D]``, written in full.
        lse
            Optional float32 ``[T, H]``, receives the natural-log sum of exponentials, the sink's included.

        In a captured bucket it must allocate nothing that outlives the call outside the graph's pool, read no host integer
        but bucket constants, and never synchronise.
        """


def require_layout(backend: str, layout: KVLayout, known: tuple[KVLayout, ...]) -> None:
    """Raise `PluginError` where a backend of that name is given a layout that it does not read."""
    if layout.axes not in {other.axes for other in known}:
        names = " and ".join(other.name for other in known)
        raise PluginError(f"attention backend {backend!r} reads the KV layouts {names}, not {layout.name!r}")


def require_whole_heads(backend: str, cache: Tensor) -> None:
    """Raise `PluginError` where the last axis of a cache is not contiguous."""
    if cache.stride(4) != 1:
        raise PluginError(
            f"attention backend {backend!r} needs a head's elements side by side, got a cache of strides {cache.stride()}; "
            "use a KV layout whose last axis is head_dim"
        )


def require_single_token_decode(backend: str, phase: Phase, bucket: Bucket) -> None:
    """Raise `PluginError` where another step is to be captured than one of decode rows with a token each."""
    if bucket.captured and (phase != "decode" or bucket.query_len != 1):
        raise PluginError(
            f"attention backend {backend!r} captures decode steps of one token a row, not {phase} steps of "
            f"{bucket.query_len}; run longer steps eagerly"
        )


#: A factory as it stands in a record; typed loosely there to stay torch-free.
AttentionFactory = Any
