"""Runs a model over a paged cache, step by step, without an engine: rows start empty, and a step may mix their phases.

Attention is `enginebay.conformance.attention.plain`'s, so no backend plugin takes part. It knows no architecture.

Shapes: ``T`` tokens of a step, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from enginebay.conformance.attention.plain import PlainAttention
from enginebay.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer, PlanState
from enginebay.interfaces.batch import Batch, Bucket, GroupBatch, PhaseBatch
from enginebay.interfaces.model import CausalLM
from enginebay.kernels.cpu import ops
from enginebay.layers.attention import AttentionRuntime
from enginebay.plugins.records import NHD, NoOptions, Phase
from enginebay.plugins.requirements import AttentionSpec

#: tokens a block: prompts of some ten tokens cross several
BLOCK = 4


class KernelDecode(AttentionBackend):
    """Decode steps on CPU through the core's compiled kernel, so that they can be recorded."""

    replayable = True

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
        """See `AttentionBackend.attend`."""
        spec, table = layer.spec, batch.groups[self.context.group].block_table
        limits: dict[str, Any] = {"scale": spec.scale, "window": spec.window, "soft_cap": spec.soft_cap}
        ops.decode_attention(query, cache, table, batch.seq_lens, out, lse=lse, **limits)


class Runner:
    """A model bound to a cache of its own.

    Parameters
    ----------
    model
        Loaded, not bound yet.
    num_rows
        Rows that hold requests.
    max_len
        Most tokens a row.
    decode
        The backend of single-token rows; `PlainAttention` serves the others.
    """

    def __init__(
        self, model: CausalLM, *, num_rows: int = 2, max_len: int = 64, decode: type[AttentionBackend] = PlainAttention
    ) -> None:
        self.model = model
        #: tokens whose keys and values are in the cache, a row
        self.computed = [0] * num_rows
        self._max_len = max_len
        parameter = next(model.parameters())
        self._dtype, self._device = parameter.dtype, parameter.device
        columns = -(-max_len // BLOCK)
        # rows' blocks interleave, so that nothing works by accident of order
        self.table = 1 + torch.arange(columns)[None] * num_rows + torch.arange(num_rows)[:, None]
        groups: dict[AttentionSpec, AttentionRuntime] = {}
        for layer in model.attention_layers:
            spec = layer.spec
            if spec not in groups:
                group = len(groups)
                prefill = PlainAttention(self._context(spec, group, "prefill"))
                groups[spec] = AttentionRuntime(group, decode(self._context(spec, group, "decode")), prefill)
            shape = (1 + columns * num_rows, 2, BLOCK, spec.num_kv_heads, spec.head_dim)
            layer.bind(groups[spec], torch.zeros(shape, dtype=self._dtype, device=self._device))
        #: one a cache group
        self.runtimes = list(groups.values())

    def _context(self, spec: AttentionSpec, group: int, phase: Phase) -> AttentionContext:
        return AttentionContext(
            spec=spec,
            group=group,
            phase=phase,
            dtype=self._dtype,
            kv_dtype=self._dtype,
            device=self._device,
            block_size=BLOCK,
            layout=NHD,
            max_num_rows=len(self.computed),
            max_num_tokens=len(self.computed) * self._max_len,
            max_model_len=self._max_len,
            options=NoOptions(),
        )

    def step(self, tokens: Mapping[int, Sequence[int]], offset: int = 0) -> Tensor:
        """Logits ``[T, V]`` of each row's next tokens, single-token rows first; `offset` shifts rotary positions."""
        return self.run(self.prepare(tokens, {row: self._next(row, ids, offset) for row, ids in tokens.items()}))

    def rows(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """The same by row."""
        order = _decode_first(tokens)
        parts = torch.split(self.step(tokens), [len(tokens[row]) for row in order])
        return dict(zip(order, parts, strict=True))

    def release(self, row: int) -> None:
        """Take a row's request away; its blocks keep what is in them."""
        self.computed[row] = 0

    @torch.no_grad()
    def run(self, batch: Batch) -> Tensor:
        """Logits ``[T, V]`` of a prepared step."""
        return self.model.compute_logits(self.model(batch.input_ids, batch.positions))

    def prepare(
        self, tokens: Mapping[int, Sequence[int]], positions: Mapping[int, Sequence[int]] | None = None
    ) -> Batch:
        """Plan a step of each row's next tokens; `positions` are what they are rotated by, their places if None."""
        rows = _decode_first(tokens)
        num_decode = sum(len(tokens[row]) == 1 for row in rows)
        rotated = positions or {row: self._next(row, tokens[row]) for row in rows}
        places = torch.tensor([place for row in rows for place in self._next(row, tokens[row])])
        of_row = torch.tensor([row for row in rows for _ in tokens[row]])
        slots = self.table[of_row, places // BLOCK] * BLOCK + places % BLOCK
        for row in rows:
            self.computed[row] += len(tokens[row])
        at = self._there(torch.tensor([position for row in rows for position in rotated[row]]))
        slots = self._there(slots)
        batch = Batch(
            num_rows=len(rows),
            num_tokens=len(at),
            slot_of_row=self._there(torch.tensor(rows)),
            input_ids=self._there(torch.tensor([token for row in rows for token in tokens[row]])),
            positions=at,
            logits_indices=self._there(torch.arange(len(at))),
            slot_mappings=tuple(slots for _ in self.runtimes),
            decode=self._phase(rows[:num_decode], tokens, slots[:num_decode], at[:num_decode]),
            prefill=self._phase(rows[num_decode:], tokens, slots[num_decode:], at[num_decode:]),
        )
        self._plan(batch)
        return batch

    def _plan(self, batch: Batch) -> None:
        for runtime in self.runtimes:
            runtime.batch = batch
            if batch.decode is not None:
                runtime.decode_state = runtime.decode.make_state(Bucket(batch.decode.num_rows, 1))
                runtime.decode.plan(batch.decode, runtime.decode_state)
            if batch.prefill is not None:
                bucket = Bucket(batch.prefill.num_rows, batch.prefill.max_query_len)
                runtime.prefill_state = runtime.prefill.make_state(bucket)
                runtime.prefill.plan(batch.prefill, runtime.prefill_state)

    def _next(self, row: int, ids: Sequence[int], offset: int = 0) -> range:
        start = self.computed[row] + offset
        return range(start, start + len(ids))

    def _phase(
        self, rows: Sequence[int], tokens: Mapping[int, Sequence[int]], slots: Tensor, positions: Tensor
    ) -> PhaseBatch | None:
        if not rows:
            return None
        counts = [len(tokens[row]) for row in rows]
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        lens = np.array([self.computed[row] for row in rows], np.int32)
        group = GroupBatch(self._there(self.table[list(rows)].int()), slots)
        return PhaseBatch(
            num_rows=len(rows),
            num_tokens=int(starts[-1]),
            max_query_len=max(counts),
            max_seq_len=int(lens.max()),
            query_start_loc=self._there(torch.from_numpy(starts)),
            seq_lens=self._there(torch.from_numpy(lens)),
            positions=positions,
            groups=tuple(group for _ in self.runtimes),
            query_start_loc_host=starts,
            seq_lens_host=lens,
        )

    def _there(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device)


def overwrite(batch: Batch, other: Batch) -> None:
    """Write another decode step of as many rows into the tensors of `batch`, which keep their addresses."""
    assert batch.decode is not None
    assert other.decode is not None
    batch.input_ids.copy_(other.input_ids)
    batch.positions.copy_(other.positions)
    batch.decode.seq_lens.copy_(other.decode.seq_lens)
    for mine, its in zip(batch.slot_mappings, other.slot_mappings, strict=True):
        mine.copy_(its)
    for group, its_group in zip(batch.decode.groups, other.decode.groups, strict=True):
        group.block_table.copy_(its_group.block_table)


def _decode_first(tokens: Mapping[int, Sequence[int]]) -> list[int]:
    return sorted(tokens, key=lambda row: len(tokens[row]) > 1)
