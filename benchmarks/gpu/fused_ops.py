"""The fused kernels' work, twice: through the engine's function and through torch's parts for the same.

Sizes are an 8B Llama's: width 4096, MLP 14336, 32 query and 8 KV heads of 128. Bytes are those that must move: every input
read once, every output written once. An operation holds as many copies of its tensors as no second-level cache keeps.

Shapes: ``T`` tokens, ``d`` width, ``F`` the MLP's, ``H`` query heads, ``K`` KV heads, ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from enginebay.interfaces.attention import AttentionBackend, AttentionContext
from enginebay.interfaces.batch import Batch
from enginebay.kernels.activation import gelu_tanh_mul, silu_mul
from enginebay.kernels.kv_write import reshape_and_cache
from enginebay.kernels.norm import add_rms_norm
from enginebay.kernels.rope import apply_rope_
from enginebay.layers.attention import Attention, AttentionRuntime
from enginebay.layers.norm import RMSNorm
from enginebay.layers.rotary import Rotary
from enginebay.plugins.records import NHD, NoOptions
from enginebay.plugins.requirements import AttentionSpec
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig

EPS = 1e-5
BLOCK_SIZE = 16
#: most copies: at one token they need not outgrow any cache, since activations are in it when a model runs, too
MOST_COPIES = 64


@dataclass(frozen=True)
class Sizes:
    """Of the model that the operations are taken from."""

    width: int = 4096
    mlp: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128


@dataclass(frozen=True)
class Operation:
    """One fused operation at one number of tokens."""

    name: str
    #: bytes read and written by a call
    num_bytes: int
    #: through the engine, and in torch's parts, on the copy of that number; each returns all that it wrote
    fused: Callable[[int], tuple[Tensor, ...]]
    parts: Callable[[int], tuple[Tensor, ...]]
    #: how many copies there are
    copies: int
    #: what a call overwrites that it also reads, by copy
    inputs: tuple[tuple[Tensor, ...], ...]
    #: of a result's elements, which rounding is relative to
    magnitude: Callable[[Tensor], Tensor] = torch.abs


Make = Callable[[int, Sizes, torch.dtype, torch.device, int], Operation]


def add_norm(tokens: int, sizes: Sizes, dtype: torch.dtype, device: torch.device, beyond: int) -> Operation:
    """Residual addition in place, and RMSNorm of the sum."""
    num_bytes = (4 * tokens + 1) * sizes.width * dtype.itemsize
    copies = _copies(num_bytes, beyond)
    weight = torch.randn(sizes.width, dtype=dtype, device=device)
    x, residual = (torch.randn(copies, tokens, sizes.width, dtype=dtype, device=device) for _ in range(2))

    def fused(i: int) -> tuple[Tensor, ...]:
        return add_rms_norm(x[i], residual[i], weight, EPS), residual[i]

    def parts(i: int) -> tuple[Tensor, ...]:
        residual[i].add_(x[i])
        return functional.rms_norm(residual[i], (sizes.width,), weight, EPS), residual[i]

    return Operation("add_rms_norm", num_bytes, fused, parts, copies, tuple((r,) for r in residual))


def _gated(name: str, function: Callable[[Tensor], Tensor], parts: Callable[[Tensor, Tensor], Tensor]) -> Make:
    def make(tokens: int, sizes: Sizes, dtype: torch.dtype, device: torch.device, beyond: int) -> Operation:
        num_bytes = 3 * tokens * sizes.mlp * dtype.itemsize
        copies = _copies(num_bytes, beyond)
        gate_up = torch.randn(copies, tokens, 2 * sizes.mlp, dtype=dtype, device=device)
        return Operation(
            name,
            num_bytes,
            lambda i: (function(gate_up[i]),),
            lambda i: (parts(*gate_up[i].chunk(2, -1)),),
            copies,
            tuple(() for _ in range(copies)),
        )

    return make


silu = _gated("silu_mul", silu_mul, lambda gate, up: functional.silu(gate).mul_(up))
gelu = _gated("gelu_tanh_mul", gelu_tanh_mul, lambda gate, up: functional.gelu(gate, approximate="tanh").mul_(up))


def _rope(normed: bool) -> Make:
    """Rotation of queries and keys in place, after RMSNorm of each head where `normed`, and the KV write.

    It goes through the attention layer with a step that has no rows to attend, so that the layer's choice of kernel is part.
    """

    def make(tokens: int, sizes: Sizes, dtype: torch.dtype, device: torch.device, beyond: int) -> Operation:
        heads, kv_heads, size = sizes.heads, sizes.kv_heads, sizes.head_dim
        # queries go back in place, keys and values to the cache, and each token's line of the table is read
        num_bytes = tokens * (2 * (heads + 2 * kv_heads) + 2) * size * dtype.itemsize
        copies = _copies(num_bytes, beyond)
        states = torch.randn(copies, tokens, heads + 2 * kv_heads, size, dtype=dtype, device=device)
        blocks = -(-tokens // BLOCK_SIZE)
        caches = torch.zeros(copies, blocks + 1, 2, BLOCK_SIZE, kv_heads, size, dtype=dtype, device=device)
        ids = torch.randperm(blocks, device=device) + 1
        at = torch.arange(tokens, device=device)
        slots = ids[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
        config = LlamaConfig(head_dim=size, max_position_embeddings=8192)
        rotary = Rotary(config, None, tokens, dtype, device)
        q_norm, k_norm = (_head_norm(size, dtype, device) if normed else None for _ in range(2))
        spec = AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=size, scale=1.0)
        backend = _NoAttention(_context(spec, dtype, device))
        step = Batch(tokens, tokens, slots, slots, at, slots, (slots,), decode=None, prefill=None)
        runtime = AttentionRuntime(0, backend, backend, step)
        layers = [Attention(0, spec, q_norm, k_norm, rotary) for _ in range(copies)]
        for layer, cache in zip(layers, caches, strict=True):
            layer.bind(runtime, cache)

        def fused(i: int) -> tuple[Tensor, ...]:
            layers[i](states[i].view(tokens, -1), at)
            return states[i][:, :heads], caches[i]

        def parts(i: int) -> tuple[Tensor, ...]:
            query, key = states[i][:, :heads], states[i][:, heads : heads + kv_heads]
            for part, norm in ((query, q_norm), (key, k_norm)):
                if norm is not None:
                    part.copy_(functional.rms_norm(part, (size,), norm.weight, EPS))
            apply_rope_(states[i][:, : heads + kv_heads], at, rotary.table)
            reshape_and_cache(states[i][:, heads:].view(tokens, 2, kv_heads, size), caches[i], slots)
            return query, caches[i]

        name = "qk_norm_rope_and_cache" if normed else "rope_and_cache"
        return Operation(name, num_bytes, fused, parts, copies, tuple((s,) for s in states), _pair_magnitude)

    return make


def _head_norm(size: int, dtype: torch.dtype, device: torch.device) -> RMSNorm:
    norm = RMSNorm("norm", size, EPS, dtype, device)
    norm.weight.data.normal_()
    return norm


class _NoAttention(AttentionBackend):
    """Of a step without rows."""

    def attend(self, *args: Any) -> None:
        raise AssertionError("the step has no rows")


def _context(spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> AttentionContext:
    return AttentionContext(
        spec=spec,
        group=0,
        phase="prefill",
        dtype=dtype,
        kv_dtype=dtype,
        device=device,
        block_size=BLOCK_SIZE,
        layout=NHD,
        max_num_rows=1,
        max_num_tokens=1,
        max_model_len=1,
        options=NoOptions(),
    )


rope, normed_rope = _rope(False), _rope(True)
OPERATIONS: tuple[Make, ...] = (add_norm, rope, normed_rope, silu, gelu)


def worst_error(operation: Operation) -> float:
    """Largest difference of the fused results from the parts', as a share of what the dtype allows.

    What is allowed is three units of the result's magnitude, and of 1 where results are small, since the parts round between
    steps where the fused kernel does not. NaN where either gives NaN.
    """
    kept = [t.clone() for t in operation.inputs[0]]
    fused: list[Tensor] = []
    parts: list[Tensor] = []
    for function, results in ((operation.fused, fused), (operation.parts, parts)):
        for tensor, value in zip(operation.inputs[0], kept, strict=True):
            tensor.copy_(value)
        results += [t.clone() for t in function(0)]
    shares = []
    for ours, theirs in zip(fused, parts, strict=True):
        allowed = 3 * torch.finfo(theirs.dtype).eps * operation.magnitude(theirs.float()).clamp(min=1)
        shares.append(((ours.float() - theirs.float()).abs() / allowed).max())
    return float(torch.stack(shares).max())


def _pair_magnitude(x: Tensor) -> Tensor:
    """Of the pair that a rotation mixes, which keeps it."""
    return x.hypot(x.roll(x.shape[-1] // 2, -1))


def _copies(num_bytes: int, beyond: int) -> int:
    return max(1, min(MOST_COPIES, -(-beyond // num_bytes)))
