"""What can be wrong with an attention backend: the plain one, broken in one way each."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from enginebay.conformance.attention.plain import PlainAttention as Plain
from enginebay.interfaces.attention import AttentionContext, AttentionLayer, PlanState
from enginebay.interfaces.batch import NULL_BLOCK, PhaseBatch
from enginebay.plugins.records import HND, NHD, AttentionRecord
from enginebay.plugins.requirements import FP8, Reason, Requirements
from enginebay_torch_attention import RECORD as TORCH
from enginebay_torch_attention.backend import TorchAttention
from mutant import Mutant, accepts_everything, refuses_without_a_word
from torch import Tensor


def record_of(factory: Callable[[AttentionContext], Any], **changes: Any) -> AttentionRecord:
    """The record of a `Plain` or of a mutant of it."""
    fields: dict[str, Any] = {
        "name": "plain",
        "summary": "the definition",
        "factory": factory,
        "api_version": 0,
        "devices": ("cpu",),
        "dtypes": ("float32", "bfloat16"),
        "kv_dtypes": ("float32", FP8),
        "head_dims": (16, 32),
        "layouts": (NHD, HND),
        "kernel_blocks": (8,),
        "window": True,
        "soft_cap": True,
        "sinks": True,
        "host_lens": "none",
    }
    return AttentionRecord(**fields | changes)


ORIGINALS = {"cpu": record_of(Plain), "cuda": TORCH}
RECORD = ORIGINALS["cpu"]


class SeesTheNextToken(Plain):
    def outside(self, distance: Tensor, window: int) -> Tensor:
        return (distance < -1) | (distance >= window)


class WindowOneTooLong(Plain):
    def outside(self, distance: Tensor, window: int) -> Tensor:
        return (distance < 0) | (distance > window)


class CapsAfterTheMask(Plain):
    """tanh of the scores without dividing by the cap first."""

    def cap(self, scores: Tensor, cap: float) -> Tensor:
        return cap * torch.tanh(scores)


class InterleavesHeads(Plain):
    """Takes query head h's KV head as ``h % K`` instead of ``h // (H / K)``."""

    def spread(self, x: Tensor, layer: AttentionLayer) -> Tensor:
        return x.repeat(1, layer.spec.num_heads // layer.spec.num_kv_heads, 1)


class KeyScaleForValues(Plain):
    def keys_and_values(
        self, layer: AttentionLayer, cache: Tensor, batch: PhaseBatch, row: int, seq: int
    ) -> tuple[Tensor, Tensor]:
        return super().keys_and_values(replace(layer, v_scale=layer.k_scale), cache, batch, row, seq)


class ForgetsSinks(Plain):
    def sinks(self, layer: AttentionLayer) -> Tensor:
        return torch.full_like(super().sinks(layer), -math.inf)


class ReadsValuesThroughContiguousBlocks(Plain):
    """Assumes that a row's blocks follow one another."""

    def blocks(self, batch: PhaseBatch, row: int, seq: int) -> Tensor:
        first = int(self.table(batch, row)[0])
        top = int(batch.groups[self.context.group].block_table[:, 0].max())
        return (first + torch.arange(-(-seq // self.context.block_size))).clamp(max=top)


class Log2Lse(Plain):
    def lse(self, sums: Tensor, layer: AttentionLayer) -> Tensor:
        return sums / math.log(2)


class LseWithoutSink(Plain):
    def lse(self, sums: Tensor, layer: AttentionLayer) -> Tensor:
        if layer.sinks is None:
            return sums
        rest = 1 - (layer.sinks[:, None] - sums).exp()
        return sums + rest.clamp_min(1e-30).log()


class ReadsAll(Plain):
    """Sums over the whole cache with weights of 0 where a row has no tokens."""

    def attend(self, layer: AttentionLayer, query: Tensor, cache: Tensor, *rest: Any) -> None:
        super().attend(layer, query, cache, *rest)
        rest[2].add_((cache.float().sum() * 0).to(query.dtype))


class ReadsPastTheEnd(Plain):
    """Adds a whisper of what lies past a row's last token."""

    def keys_and_values(
        self, layer: AttentionLayer, cache: Tensor, batch: PhaseBatch, row: int, seq: int
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().keys_and_values(layer, cache, batch, row, seq)
        last = cache[self.blocks(batch, row, seq)[-1], 1].float()
        past = last[(seq - 1) % self.context.block_size + 1 :].abs()
        return keys, values + (past.amax() > 100) * 0.5 if len(past) else values


class ClearsTheTail(Plain):
    """Zeroes what lies past a row's last token, so as to load whole blocks."""

    def keys_and_values(
        self, layer: AttentionLayer, cache: Tensor, batch: PhaseBatch, row: int, seq: int
    ) -> tuple[Tensor, Tensor]:
        found = super().keys_and_values(layer, cache, batch, row, seq)
        if used := seq % self.context.block_size:
            cache[int(self.blocks(batch, row, seq)[-1]), :, used:] = 0
        return found


class ScalesInPlace(Plain):
    """Scales float32 queries where they lie, and back again, which rounds."""

    def attend(self, layer: AttentionLayer, query: Tensor, *rest: Any) -> None:
        super().attend(layer, query, *rest)
        if query.dtype == torch.float32:
            query.mul_(layer.spec.scale).div_(layer.spec.scale * (1 + 1e-6))


class OneOwnerABlock(Plain):
    """Keeps the cache by owner: a block that two rows hold is the last one's."""

    def keys_and_values(
        self, layer: AttentionLayer, cache: Tensor, batch: PhaseBatch, row: int, seq: int
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().keys_and_values(layer, cache, batch, row, seq)
        lens = batch.seq_lens.tolist()
        later = {int(b) for r in range(row + 1, batch.num_rows) for b in self.blocks(batch, r, lens[r])}
        for column, block in enumerate(self.blocks(batch, row, seq).tolist()):
            if block in later:
                keys[column * self.context.block_size : (column + 1) * self.context.block_size] = 0
        return keys, values


class FirstGroupOnly(Plain):
    def table(self, batch: PhaseBatch, row: int) -> Tensor:
        return batch.groups[0].block_table[row]


class FastPathAlone(Plain):
    """A fast path for one row that stops one key short."""

    def hidden(self, layer: AttentionLayer, queries: int, seq: int) -> Tensor:
        hidden = super().hidden(layer, queries, seq)
        if self._rows == 1 and seq > queries:
            hidden[:, 0] = True
        elif self._rows == 1 and seq > 1:
            hidden[1:, 0] = True
        return hidden

    def attend(self, layer: AttentionLayer, query: Tensor, cache: Tensor, batch: PhaseBatch, *rest: Any) -> None:
        self._rows = batch.num_rows
        super().attend(layer, query, cache, batch, *rest)


class KeepsFirstKeys(Plain):
    """Remembers a block's keys when it first reads it; chunks that come later are not seen."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self._kept: dict[int, Tensor] = {}

    def keys_and_values(
        self, layer: AttentionLayer, cache: Tensor, batch: PhaseBatch, row: int, seq: int
    ) -> tuple[Tensor, Tensor]:
        blocks = self.blocks(batch, row, seq).tolist()
        for block in blocks:
            self._kept.setdefault(block, cache[block].float().clone())
        kept = torch.stack([self._kept[block] for block in blocks])
        keys, values = (kept[:, i].flatten(0, 1)[:seq] for i in (0, 1))
        return keys * layer.k_scale, values * layer.v_scale


class PlansOnce(Plain):
    """Takes a state that has been planned for planned."""

    def plan(self, batch: PhaseBatch, state: PlanState) -> None:
        # chunks of one row are planned anew, or the law before this one would find it
        if "lens" not in vars(state) or batch.num_rows == 1:
            super().plan(batch, state)


class FirstLayersCache(Plain):
    def attend(
        self, layer: AttentionLayer, query: Tensor, cache: Tensor, batch: PhaseBatch, state: Any, *rest: Any
    ) -> None:
        cache = vars(state).setdefault("cache", cache)
        super().attend(layer, query, cache, batch, state, *rest)

    def plan(self, batch: PhaseBatch, state: PlanState) -> None:
        super().plan(batch, state)
        vars(state).pop("cache", None)


class RefusesPadding(Plain):
    """Takes the null block for a fault."""

    def plan(self, batch: PhaseBatch, state: PlanState) -> None:
        super().plan(batch, state)
        if (batch.groups[self.context.group].block_table[:, 0] == NULL_BLOCK).any():
            raise ValueError("a row has no block")


class ReadsHostLengths(Plain):
    """Declares that it reads no length on the host, and does."""

    def seq_len(self, batch: PhaseBatch, state: PlanState, row: int) -> int:
        return min(int(batch.seq_lens_host[row]), batch.max_seq_len + 7)


def _no_backend(context: AttentionContext) -> object:
    return functools.partial(Plain, context)


def _wants_a_window(req: Requirements) -> list[Reason]:
    windows = [spec.window for spec in req.attention]
    return [] if all(windows) else [Reason(code="window", wanted="full attention", allowed="a sliding window")]


class Truncates(Plain):
    """Leaves the last token of a step unwritten."""

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        cache: Tensor,
        batch: PhaseBatch,
        state: Any,
        out: Tensor,
        *rest: Any,
    ) -> None:
        state, out, *lse = rest
        whole = out.clone()
        super().attend(layer, query, cache, batch, state, whole, *lse)
        out[:-1] = whole[:-1]


class PlansACaptureOnce(TorchAttention):
    """Takes what was planned before the capture for the plan of every replay."""

    def plan(self, batch: PhaseBatch, state: PlanState) -> None:
        if not (state.bucket.captured and vars(state).setdefault("planned", 0)):
            super().plan(batch, state)
        vars(state)["planned"] = 1


class AsksTheDevice(TorchAttention):
    """Reads the greatest length back from the device."""

    def plan(self, batch: PhaseBatch, state: PlanState) -> None:
        super().plan(batch, state)
        vars(state)["greatest"] = int(batch.seq_lens.max())


OUTPUT = "output_equals_float32"
MUTANTS = [
    Mutant("no_backend", "the factory returns a function", "factory_gives_a_backend", record_of(_no_backend)),
    Mutant(
        "demands_a_window",
        "its check refuses what its fields declare",
        "what_is_declared_is_accepted",
        replace(RECORD, check=_wants_a_window),
    ),
    Mutant(
        "accepts_everything",
        "its record answers yes to every demand",
        "what_is_not_declared_is_refused",
        accepts_everything(RECORD),
    ),
    Mutant(
        "refuses_without_a_word",
        "its record answers no without a reason",
        "what_is_not_declared_is_refused",
        refuses_without_a_word(RECORD),
    ),
    *(
        Mutant(name, fault, law, record_of(backend))
        for name, fault, law, backend in (
            ("sees_the_next_token", "the causal mask lets one token too many through", OUTPUT, SeesTheNextToken),
            ("window_one_too_long", "the window counts the query's own token twice", OUTPUT, WindowOneTooLong),
            ("cap_not_divided", "the soft cap multiplies but does not divide", OUTPUT, CapsAfterTheMask),
            ("heads_interleaved", "query heads are dealt to KV heads in turn", OUTPUT, InterleavesHeads),
            ("key_scale_for_values", "values of an fp8 cache get the keys' scale", OUTPUT, KeyScaleForValues),
            ("forgets_sinks", "the sink does not join the softmax", OUTPUT, ForgetsSinks),
            (
                "contiguous_blocks",
                "a row's blocks are taken to follow one another",
                OUTPUT,
                ReadsValuesThroughContiguousBlocks,
            ),
            ("truncates", "the last token of a step is left unwritten", OUTPUT, Truncates),
            ("lse_base_2", "lse is a binary logarithm", "lse_is_the_natural_log_sum", Log2Lse),
            ("lse_without_sink", "lse leaves the sink out", "lse_is_the_natural_log_sum", LseWithoutSink),
            (
                "zero_times_everything",
                "other rows' blocks are read with weight 0",
                "only_its_rows_tokens_are_read",
                ReadsAll,
            ),
            (
                "reads_past_the_end",
                "what lies past the last token shows",
                "only_its_rows_tokens_are_read",
                ReadsPastTheEnd,
            ),
            (
                "clears_the_tail",
                "the cache is cleared past the last token",
                "nothing_but_the_outputs_is_written",
                ClearsTheTail,
            ),
            (
                "scales_queries_in_place",
                "queries are changed where they lie",
                "nothing_but_the_outputs_is_written",
                ScalesInPlace,
            ),
            ("one_owner_a_block", "a block is taken to belong to one row", "rows_may_share_blocks", OneOwnerABlock),
            (
                "first_group_only",
                "the first cache group's table is read",
                "the_groups_own_block_table_is_read",
                FirstGroupOnly,
            ),
            (
                "fast_path_when_alone",
                "a fast path for one row drops a key",
                "the_batchs_composition_changes_no_row",
                FastPathAlone,
            ),
            (
                "keeps_the_first_keys",
                "keys are kept from when a block was first read",
                "chunks_equal_the_whole",
                KeepsFirstKeys,
            ),
            ("plans_once", "a state that was planned is not planned again", "a_state_serves_the_next_step", PlansOnce),
            (
                "first_layers_cache",
                "the first layer's cache serves all",
                "layers_of_a_group_share_a_plan",
                FirstLayersCache,
            ),
            (
                "refuses_padding",
                "a row in the null block is taken for a fault",
                "padding_rows_change_nothing",
                RefusesPadding,
            ),
            (
                "reads_host_lengths",
                "host lengths are read against the record's word",
                "host_lengths_are_read_as_declared",
                ReadsHostLengths,
            ),
        )
    ),
    Mutant(
        "plans_a_capture_once",
        "a captured state is planned before the capture only",
        "graph_replay_equals_eager",
        replace(TORCH, factory=PlansACaptureOnce),
        "cuda",
    ),
    Mutant(
        "asks_the_device",
        "the plan reads a length back from the device",
        "nothing_waits_for_the_device",
        replace(TORCH, factory=AsksTheDevice),
        "cuda",
    ),
]
