"""A random attention step over a paged cache, and what float32 makes of it: shared by the tests of several backends."""

from __future__ import annotations

import math

import numpy as np
import torch
from enginebay.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer, PlanState
from enginebay.interfaces.batch import Bucket, GroupBatch, PhaseBatch
from enginebay.plugins.records import NHD, KVLayout, Phase
from enginebay.plugins.requirements import AttentionSpec
from pydantic import BaseModel
from torch import Tensor


class PagedStep:
    """A random step of one phase: a cache, its blocks in random order, queries and sinks."""

    def __init__(
        self,
        seq_lens: list[int],
        query_lens: list[int],
        *,
        spec: AttentionSpec,
        layout: KVLayout = NHD,
        block_size: int = 16,
        max_model_len: int = 512,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        scales: tuple[float, float] = (1.0, 1.0),
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.spec, self.block_size, self.layout = spec, block_size, layout
        rows, columns = len(seq_lens), -(-max_model_len // block_size)
        counts = [-(-n // block_size) for n in seq_lens]
        sizes = {"blocks": 1 + sum(counts), "kv": 2, "block": block_size}
        sizes |= {"kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
        memory = torch.randn([sizes[a] for a in layout.axes], generator=generator).to(kv_dtype or dtype)
        self.cache = memory.to(device).permute([layout.axes.index(a) for a in NHD.axes])
        table = torch.full((rows, columns), 2**30, dtype=torch.int32)  # past the end: never to be followed
        ids = torch.randperm(sum(counts), generator=generator) + 1
        for row, count in enumerate(counts):
            table[row, :count] = ids[:count]
            ids = ids[count:]
        tokens = sum(query_lens)
        # queries are a view into fused QKV, as the attention layer hands out
        fused = torch.randn(tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim, generator=generator)
        self.query = fused.to(dtype).to(device)[:, : spec.num_heads]
        sinks = torch.randn(spec.num_heads, generator=generator).to(device) if spec.sinks else None
        self.layer = AttentionLayer(0, spec, *scales, sinks=sinks)
        starts = np.cumsum([0, *query_lens]).astype(np.int32)
        positions = [torch.arange(n - q, n) for n, q in zip(seq_lens, query_lens, strict=True)]
        self.batch = PhaseBatch(
            num_rows=rows,
            num_tokens=tokens,
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            query_start_loc=torch.from_numpy(starts).to(device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            positions=torch.cat(positions).to(device),
            groups=(GroupBatch(table.to(device), torch.zeros(tokens, dtype=torch.int64, device=device)),),
            query_start_loc_host=starts,
            seq_lens_host=np.array(seq_lens, dtype=np.int32),
        )

    def reference(self) -> tuple[Tensor, Tensor]:
        """``[T, H, D]`` and natural-log lse ``[T, H]`` in float32, by the definition."""
        batch, layer, outs, lses = self.batch, self.layer, [], []
        for row in range(batch.num_rows):
            start, end = batch.query_start_loc_host[row : row + 2].tolist()
            length = int(batch.seq_lens_host[row])
            blocks = batch.groups[0].block_table[row, : -(-length // self.block_size)].long()
            key, value = self.cache[blocks].float().transpose(0, 1).flatten(1, 2)[:, :length]
            key, value = key * layer.k_scale, value * layer.v_scale
            out, lse = attention(self.query[start:end].float(), key, value, self.spec, layer.sinks)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)

    def context_of(
        self, phase: Phase, options: BaseModel, *, max_num_rows: int, layout: KVLayout | None = None
    ) -> AttentionContext:
        """What a backend's factory is given for this step; `layout` may differ from the step's."""
        return AttentionContext(
            spec=self.spec,
            group=0,
            phase=phase,
            dtype=self.query.dtype,
            kv_dtype=self.cache.dtype,
            device=self.query.device,
            block_size=self.block_size,
            layout=self.layout if layout is None else layout,
            max_num_rows=max_num_rows,
            max_num_tokens=4096,
            max_model_len=self.batch.groups[0].block_table.shape[1] * self.block_size,
            options=options,
        )

    def run(
        self, backend: AttentionBackend, state: PlanState | None = None, *, plan: bool = True, with_lse: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Attend into poisoned outputs."""
        state = backend.make_state(Bucket(512, 512)) if state is None else state
        if plan:
            backend.plan(self.batch, state)
        out = torch.full_like(self.query, math.nan).contiguous()
        lse = torch.full(out.shape[:2], math.nan, dtype=torch.float32, device=out.device)
        backend.attend(self.layer, self.query, self.cache, self.batch, state, out, lse if with_lse else None)
        return out, lse


def attention(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One row, causal to its end. query ``[Q, H, D]``, key and value ``[S, K, D]``."""
    group = spec.num_heads // spec.num_kv_heads
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,shd->hqs", query, key) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    num_queries, num_keys = query.shape[0], key.shape[0]
    distance = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)[None]
    hidden = distance < 0
    if spec.window is not None:
        hidden |= distance >= spec.window
    scores = scores.masked_fill(hidden.to(scores.device), -math.inf)
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks[:, None].expand_as(lse))
    return torch.einsum("hqs,shd->qhd", (scores - lse[..., None]).exp(), value), lse.T


def close_in_16_bits(step: PagedStep, out: Tensor, lse: Tensor) -> None:
    """Assert what a kernel in bfloat16 or float16 can keep."""
    expected, expected_lse = step.reference()
    assert ((out.float() - expected).norm() / expected.norm()).item() < 1e-2
    torch.testing.assert_close(lse, expected_lse, atol=2e-2, rtol=2e-3)
