"""The attention layer: splits QKV, normalises and rotates, writes the cache, and calls its group's backends.

It knows the step through the `AttentionRuntime` that it is bound to, and nothing of how a backend computes.

Shapes: ``T`` tokens of the step, ``H`` query heads, ``K`` KV heads, ``D`` head size, all on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from enginebay.errors import ModelError
from enginebay.interfaces.attention import AttentionBackend, AttentionLayer, PlanState
from enginebay.interfaces.batch import Batch
from enginebay.kernels.rope_cache import rope_and_cache
from enginebay.layers.norm import RMSNorm
from enginebay.layers.rotary import Rotary
from enginebay.plugins.requirements import AttentionSpec


@dataclass(slots=True)
class AttentionRuntime:
    """What the layers of one plan group share; the model runner sets the step's fields before each forward."""

    #: index of the cache group: ``batch.slot_mappings[group]``
    group: int
    decode: AttentionBackend
    prefill: AttentionBackend
    #: the step
    batch: Batch | None = None
    #: what `plan` filled for the phases that the step has
    decode_state: PlanState | None = None
    prefill_state: PlanState | None = None


class Attention(nn.Module):
    """One layer's attention over the paged cache.

    Parameters
    ----------
    index
        Its place among the model's attention layers.
    spec
        Its facts, heads counted on this rank.
    q_norm, k_norm
        Norms over the head size, applied before rotation.
    rope
        Rotation of queries and keys; None for none.
    sinks
        float32 ``[H]``, this rank's learned logit a head, where ``spec.sinks`` says that there is one.

    Raises
    ------
    ModelError
        `sinks` and ``spec.sinks`` disagree.
    """

    def __init__(
        self,
        index: int,
        spec: AttentionSpec,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        rope: Rotary | None,
        sinks: Tensor | None = None,
    ) -> None:
        super().__init__()
        if spec.sinks != (sinks is not None):
            raise ModelError(
                f"attention layer {index}: spec.sinks is {spec.sinks}, but sinks is {type(sinks).__name__}"
            )
        self.layer = AttentionLayer(index, spec, sinks=sinks)
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.rope = rope
        self._runtime: AttentionRuntime | None = None
        self._cache: Tensor | None = None

    @property
    def index(self) -> int:
        """The layer's place among the model's attention layers."""
        return self.layer.index

    @property
    def spec(self) -> AttentionSpec:
        """The layer's facts on this rank."""
        return self.layer.spec

    def bind(self, runtime: AttentionRuntime, cache: Tensor, *, k_scale: float = 1.0, v_scale: float = 1.0) -> None:
        """Connect the layer to its group and to its cache ``[blocks, 2, block, K, D]`` (any strides).

        An fp8 cache holds keys divided by `k_scale` and values by `v_scale`.
        """
        expected = (2, self.spec.num_kv_heads, self.spec.head_dim)
        if cache.dim() != 5 or (cache.shape[1], *cache.shape[3:]) != expected:
            raise ModelError(
                f"attention layer {self.index}: the cache must be [blocks, 2, block, {expected[1]}, {expected[2]}], "
                f"not {list(cache.shape)}"
            )
        self._runtime, self._cache = runtime, cache
        self.layer = replace(self.layer, k_scale=k_scale, v_scale=v_scale)

    def forward(self, qkv: Tensor, positions: Tensor) -> Tensor:
        """Attend.

        Parameters
        ----------
        qkv
            ``[T, (H + 2K) * D]``, overwritten.
        positions
            int64 ``[T]``.

        Returns
        -------
        Tensor
            ``[T, H * D]``, decode tokens first as in the batch. Tokens beyond the batch's phases are left undefined.
        """
        runtime, cache = self._runtime, self._cache
        batch = None if runtime is None else runtime.batch
        if runtime is None or cache is None or batch is None:
            raise ModelError(f"attention layer {self.index} ran before it was bound to a cache and a batch")
        spec = self.layer.spec
        tokens, heads, kv_heads = qkv.shape[0], spec.num_heads, spec.num_kv_heads
        states = qkv.view(tokens, heads + 2 * kv_heads, spec.head_dim)
        query = states[:, :heads]
        rope_and_cache(
            states,
            heads,
            positions,
            None if self.rope is None else self.rope.table,
            cache,
            batch.slot_mappings[runtime.group],
            q_norm=None if self.q_norm is None else (self.q_norm.weight, self.q_norm.eps),
            k_norm=None if self.k_norm is None else (self.k_norm.weight, self.k_norm.eps),
            k_scale=self.layer.k_scale,
            v_scale=self.layer.v_scale,
        )
        out = torch.empty(tokens, heads, spec.head_dim, dtype=qkv.dtype, device=qkv.device)
        self._attend(runtime, batch, query, cache, out)
        return out.view(tokens, heads * spec.head_dim)

    def _attend(self, runtime: AttentionRuntime, batch: Batch, query: Tensor, cache: Tensor, out: Tensor) -> None:
        """Each phase through its backend, into its slice of `out`."""
        decode, prefill, start = batch.decode, batch.prefill, batch.num_decode_tokens
        if decode is not None:
            assert runtime.decode_state is not None
            runtime.decode.attend(self.layer, query[:start], cache, decode, runtime.decode_state, out[:start])
        if prefill is not None:
            assert runtime.prefill_state is not None
            end = start + prefill.num_tokens
            runtime.prefill.attend(self.layer, query[start:end], cache, prefill, runtime.prefill_state, out[start:end])
