"""The arithmetic: scores, softmax and weighted values of a group of rows, in blocks of queries.

Scores, softmax and lse are float32 whatever the dtypes. It knows nothing of blocks or block tables: keys come through a
ready index. Grouped heads are never repeated: the queries that share a KV head are rows of one matrix.

Shapes: ``N`` rows, ``Q`` queries a row, ``S`` keys a row, ``K`` KV heads, ``G`` query heads a KV head, ``D`` head size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from enginebay.interfaces.attention import AttentionContext
from torch import Tensor

from enginebay_torch_attention.grouping import RowGroup
from enginebay_torch_attention.limits import Limits
from enginebay_torch_attention.paging import Prepared, flat_rows

#: Least elements of V for which a bfloat16 product beats a float32 one on CPU: below, oneDNN's call costs more.
_BF16_PRODUCT = 1 << 17


class Scratch:
    """Buffers that grow and are used again: on CPU, fresh memory costs page faults. Elsewhere the allocator caches."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory of `shape`; valid until the next `take` of the same name."""
        if self.device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=self.device)
        view = self._views.get((name, shape, dtype))
        if view is None:
            view = self._views[name, shape, dtype] = self._buffer(name, math.prod(shape), dtype).view(shape)
        return view

    def new_step(self) -> None:
        """Forget the last step's shapes."""
        self._views.clear()

    def _buffer(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < numel:
            grown = numel if buffer is None else max(numel, buffer.numel() * 5 // 4)
            # The old one goes before the new one comes; views of it are among those kept.
            del buffer
            self._buffers.pop((name, dtype), None)
            self._views.clear()
            buffer = self._buffers[name, dtype] = torch.empty(grown, dtype=dtype)
        return buffer[:numel]


class RowAttention:
    """Attention of one plan group's row groups."""

    def __init__(self, context: AttentionContext, limits: Limits) -> None:
        spec = context.spec
        self.num_kv_heads, self.head_dim = spec.num_kv_heads, spec.head_dim
        self.group_size = spec.num_heads // spec.num_kv_heads
        self.scale, self.soft_cap, self.window = spec.scale, spec.soft_cap, spec.window
        self.dtype, self.kv_dtype, self.device = context.dtype, context.kv_dtype, context.device
        self.limits = limits
        self.scratch = Scratch(context.device)
        same = context.dtype == context.kv_dtype
        #: whether products of 16-bit matrices give float32 scores; CPU has no such operation
        self.half_scores = same and context.device.type == "cuda" and context.dtype != torch.float32
        #: whether SDPA has a kernel that never holds the scores
        self.fused = (
            self.half_scores and spec.head_dim <= 256 and torch.cuda.get_device_capability(context.device) >= (8, 0)
        )
        self._bf16_values = (
            same and context.dtype == torch.bfloat16 and context.device.type == "cpu" and _fast_bf16_products()
        )

    def query_block(self, rows: RowGroup) -> int:
        """Queries a row in one block of scores."""
        per_query = rows.num_rows * rows.key_len * self.bytes_per_score
        return max(1, min(self.limits.query_block, self.limits.score_bytes // per_query))

    @property
    def bytes_per_score(self) -> int:
        """Bytes that one query and key take in all heads: scores and probabilities, and the latter in 16 bits."""
        return self.num_kv_heads * self.group_size * (4 + 4 + 2)

    @property
    def bytes_per_key(self) -> int:
        """Bytes that one gathered key and value take in all heads, conversion to float32 included."""
        converted = 0 if self.half_scores or self.kv_dtype == torch.float32 else 4
        return 2 * self.num_kv_heads * self.head_dim * (self.kv_dtype.itemsize + converted)

    def uses_sdpa(self, rows: RowGroup) -> bool:
        """Whether `rows` may go through torch's fused kernel when no lse is asked for."""
        plain = self.soft_cap is None and self.window is None
        return self.fused and plain and rows.uncached and rows.query_len > 1

    def run(
        self,
        rows: RowGroup,
        prepared: Prepared,
        query: Tensor,
        cache: Tensor,
        out: Tensor,
        lse: Tensor | None,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """Write the output (and lse) of the rows' tokens; arguments as in `AttentionBackend.attend`, `scales` the layer's."""
        n, q = rows.num_rows, rows.query_len
        tokens = rows.tokens
        if isinstance(tokens, slice):
            self._run(rows, prepared, query[tokens], cache, out[tokens], None if lse is None else lse[tokens], scales)
            return
        padded = query.index_select(0, tokens.padded)
        padded_out = self.scratch.take("out", (n * q, *query.shape[1:]), out.dtype)
        padded_lse = None if lse is None else self.scratch.take("lse", (n * q, query.shape[1]), lse.dtype)
        self._run(rows, prepared, padded, cache, padded_out, padded_lse, scales)
        out.index_copy_(0, tokens.target, padded_out.index_select(0, tokens.real))
        if lse is not None and padded_lse is not None:
            lse.index_copy_(0, tokens.target, padded_lse.index_select(0, tokens.real))

    def _run(
        self,
        rows: RowGroup,
        prepared: Prepared,
        query: Tensor,
        cache: Tensor,
        out: Tensor,
        lse: Tensor | None,
        scales: tuple[float, float],
    ) -> None:
        """As `run`, for tokens that lie row by row, ``[N * Q, H, D]``."""
        shape = (rows.num_rows, rows.query_len, self.num_kv_heads, self.group_size)
        query, out = query.view(*shape, self.head_dim), out.view(*shape, self.head_dim)
        if lse is None and self.uses_sdpa(rows):
            self._sdpa(rows, prepared, query, cache, out)
        else:
            self._blocks(rows, prepared, query, cache, out, None if lse is None else lse.view(shape), scales)

    def _gather(self, rows: RowGroup, prepared: Prepared, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the rows, ``[N * K, S, D]`` each, in the cache's dtype."""
        raw = self.scratch.take("raw", (prepared.index.shape[0], self.head_dim), self.kv_dtype)
        source, target = flat_rows(cache), raw
        if self.kv_dtype.itemsize == 1:  # torch gathers bytes, but no fp8
            source, target = source.view(torch.uint8), raw.view(torch.uint8)
        torch.index_select(source, 0, prepared.index, out=target)
        keys, values = raw.view(2, rows.num_rows * self.num_kv_heads, rows.key_len, self.head_dim).unbind()
        return keys, values

    def _float(self, name: str, tensor: Tensor, scale: float) -> Tensor:
        """As float32, and times a scale that only fp8 has."""
        if tensor.dtype == torch.float32:
            return tensor
        floats = self.scratch.take(name, tuple(tensor.shape), torch.float32).copy_(tensor)
        return floats if scale == 1.0 else floats.mul_(scale)

    def _blocks(
        self,
        rows: RowGroup,
        prepared: Prepared,
        query: Tensor,
        cache: Tensor,
        out: Tensor,
        lse: Tensor | None,
        scales: tuple[float, float],
    ) -> None:
        """Attention, one block of queries after another; query and out ``[N, Q, K, G, D]``, lse ``[N, Q, K, G]``."""
        n, k, g, d = rows.num_rows, self.num_kv_heads, self.group_size, self.head_dim
        keys, values = self._gather(rows, prepared, cache)
        if not self.half_scores:
            keys = self._float("keys", keys, scales[0])
            if not (self._bf16_values and values.numel() >= _BF16_PRODUCT):
                values = self._float("values", values, scales[1])
        for block in prepared.blocks:
            a, b, seen = block.first, block.stop, block.num_keys
            shape = (n, k, g, b - a)
            queries = self.scratch.take("queries", (*shape, d), keys.dtype)
            queries.copy_(query[:, a:b].permute(0, 2, 3, 1, 4))
            scores = self._scores(queries.view(n * k, -1, d), keys[:, :seen], block.mask, (*shape, seen))
            if lse is not None:
                lse[:, a:b].copy_(torch.logsumexp(scores, -1).view(shape).permute(0, 3, 1, 2))
            weights = self.scratch.take("weights", (n * k, g * (b - a), seen), torch.float32)
            torch.softmax(scores, -1, out=weights)
            if values.dtype != torch.float32:
                weights = self.scratch.take("half weights", (n * k, g * (b - a), seen), values.dtype).copy_(weights)
            mixed = self.scratch.take("mixed", (n * k, g * (b - a), d), values.dtype)
            torch.bmm(weights, values[:, :seen], out=mixed)
            out[:, a:b].copy_(mixed.view(*shape, d).permute(0, 3, 1, 2, 4))

    def _scores(self, queries: Tensor, keys: Tensor, mask: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Scaled, capped and masked scores, float32 ``[N * K, G * q, s]``; `shape` is ``(N, K, G, q, s)``."""
        scores = self.scratch.take("scores", (queries.shape[0], queries.shape[1], keys.shape[1]), torch.float32)
        grouped = scores.view(shape)
        if self.soft_cap is None and not self.half_scores:
            grouped.copy_(mask)  # the fastest on CPU: the product adds to it
            return scores.baddbmm_(queries, keys.transpose(1, 2), alpha=self.scale)
        if self.half_scores:
            torch.bmm(queries, keys.transpose(1, 2), out_dtype=torch.float32, out=scores)
        else:
            torch.bmm(queries, keys.transpose(1, 2), out=scores)
        if self.soft_cap is None:
            scores.mul_(self.scale)
        else:
            scores.mul_(self.scale / self.soft_cap).tanh_().mul_(self.soft_cap)
        grouped.add_(mask)
        return scores

    def _sdpa(self, rows: RowGroup, prepared: Prepared, query: Tensor, cache: Tensor, out: Tensor) -> None:
        """Attention of rows without cached keys: query i sees keys up to i, so that padding is never seen."""
        keys, values = (
            x.view(rows.num_rows, self.num_kv_heads, rows.key_len, self.head_dim)
            for x in self._gather(rows, prepared, cache)
        )
        queries = query.flatten(2, 3).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=self.scale, enable_gqa=True)
        out.flatten(2, 3).copy_(mixed.transpose(1, 2))


def _fast_bf16_products() -> bool:
    """Whether the CPU multiplies bfloat16 matrices in hardware."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
