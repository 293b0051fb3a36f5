"""One step through one backend, and how far its result may be from the float32 answer."""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from enginebay.conformance.attention.cases import Case, Work
from enginebay.conformance.attention.steps import (
    Answer,
    Row,
    make_backend,
    make_batch,
    make_cache,
    make_layer,
    make_query,
    overwrite,
    reference,
)
from enginebay.conformance.cuda import capture
from enginebay.interfaces.attention import AttentionBackend, AttentionLayer, PlanState
from enginebay.interfaces.batch import Bucket, PhaseBatch, torch_dtype
from enginebay.plugins.records import AttentionRecord
from enginebay.plugins.requirements import FP8, AttentionSpec

MAX_MODEL_LEN = 1024
#: padding rows of a captured step
PADDING_ROWS = 3
#: what fp8 keys and values are scaled by: true values are these times what the cache holds
FP8_SCALES = (0.37, 0.61)


def rows_for(work: Work, block_size: int, seed: int, longest: int) -> list[Row]:
    """Ragged rows: the edges of a block and of a tile, the longest, and two at random."""
    draw = random.Random(seed)
    if work == "decode":
        lens = [1, max(block_size - 1, 1), block_size, block_size + 1, longest, draw.randint(2, longest)]
        return [Row(1, min(n, longest)) for n in lens]
    if work == "prefill":
        lens = [1, 3, block_size, min(128, longest), min(257, longest), draw.randint(2, longest)]
        return [Row(min(n, longest), min(n, longest)) for n in lens]
    fixed = [Row(1, longest), Row(1, 1), Row(5, 5), Row(min(64, longest // 2), min(300, longest))]
    length = draw.randint(longest // 2, longest)
    return [*fixed, Row(draw.randint(2, length - 1), length)]


@dataclass
class Trial:
    """A step: its rows' tokens and lengths, cache, queries and layer."""

    record: AttentionRecord
    case: Case
    layer: AttentionLayer
    query: Tensor
    cache: Tensor
    batch: PhaseBatch

    @classmethod
    def of(
        cls,
        record: AttentionRecord,
        case: Case,
        rows: Sequence[Row],
        device: torch.device,
        *,
        seed: int = 0,
        padding: int = 0,
        spare: int = 0,
    ) -> Trial:
        """A random step of `rows`, then `padding` padding rows, with `spare` blocks that no row holds."""
        generator = torch.Generator(device).manual_seed(seed)
        scales = FP8_SCALES if case.kv_dtype == FP8 else (1.0, 1.0)
        batch, num_blocks = make_batch(
            rows, seed=seed, padding=padding, block_size=case.block_size, max_model_len=MAX_MODEL_LEN, device=device
        )
        kv_dtype = torch_dtype(case.kv_dtype)
        cache = make_cache(case.spec, case.layout, num_blocks + spare, case.block_size, kv_dtype, generator, scales)
        query = make_query(case.spec, batch.num_tokens, torch_dtype(case.dtype), generator)
        return cls(record, case, make_layer(case.spec, generator, scales), query, cache, batch)

    def backend(self, *, group: int = 0) -> AttentionBackend:
        """A new backend for it."""
        dtype, layout = self.query.dtype, self.case.layout
        args = (self.record, self.case.phase, self.batch, self.layer, self.cache, dtype, layout, MAX_MODEL_LEN)
        return make_backend(*args, group=group)

    def bucket(self, *, captured: bool = False) -> Bucket:
        """The step's size."""
        return Bucket(self.batch.num_rows, self.batch.max_query_len, captured)

    @torch.inference_mode()
    def run(
        self,
        *,
        lse: bool = False,
        backend: AttentionBackend | None = None,
        state: PlanState | None = None,
        plan: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Plan and attend into poisoned outputs, by a new backend and state where none is given."""
        backend = backend or self.backend()
        state = state or backend.make_state(self.bucket())
        out, sums = poisoned(self.query, lse)
        if plan:
            backend.plan(self.batch, state)
        backend.attend(self.layer, self.query, self.cache, self.batch, state, out, sums)
        return out, sums

    @torch.inference_mode()
    def replayed(self, live: Trial, *, lse: bool) -> tuple[Tensor, Tensor | None]:
        """Capture on `live`, as the worker does on padding rows alone, then replay on this step in the same buffers."""
        backend, batch = live.backend(), live.batch
        state = backend.make_state(live.bucket(captured=True))
        out, sums = poisoned(self.query, lse)
        backend.plan(batch, state)
        graph = capture(lambda: backend.attend(self.layer, self.query, self.cache, batch, state, out, sums))
        out.fill_(math.nan)
        if sums is not None:
            sums.fill_(math.nan)
        overwrite(batch, self.batch)
        backend.plan(batch, state)
        graph.replay()
        return out, sums

    def answer(self) -> Answer:
        """What it should give."""
        return reference(self.query, self.cache, self.batch, self.layer)

    def rows(self, order: Sequence[int]) -> Trial:
        """A step of some of its rows, in another order, over the same cache."""
        device, batch = self.query.device, self.batch
        starts = batch.query_start_loc_host
        lens = [(int(starts[r]), int(starts[r + 1]), int(batch.seq_lens_host[r])) for r in order]
        made, _ = make_batch(
            [Row(end - start, n) for start, end, n in lens],
            block_size=self.case.block_size,
            max_model_len=MAX_MODEL_LEN,
            device=device,
        )
        made.groups[0].block_table.copy_(batch.groups[0].block_table[torch.tensor(order, device=device)])
        tokens = torch.cat([torch.arange(start, end, device=device) for start, end, _ in lens])
        return replace(self, query=self.query[tokens], batch=made)


def case_trial(record: AttentionRecord, case: Case, device: torch.device, longest: int) -> Trial:
    """The step that a case is tried on."""
    seed = zlib.crc32(str(case).encode())
    rows = rows_for(case.work, case.block_size, seed, max(longest, 2 * case.block_size + 3))
    return Trial.of(record, case, rows, device, seed=seed, padding=PADDING_ROWS if case.captured else 0)


def check(record: AttentionRecord, case: Case, device: str, longest: int | None = None) -> dict[str, Any]:
    """Run a case on ``"cuda"`` or ``"cpu"``, with rows of up to `longest` tokens: 700, on a CPU 70.

    Returns what `compare` does.
    """
    where = torch.device(device)
    with torch.inference_mode():
        trial = case_trial(record, case, where, longest or (700 if device == "cuda" else 70))
        padding = PADDING_ROWS if case.captured else 0
        if case.captured:
            live = Trial.of(record, case, [], where, padding=trial.batch.num_rows)
            out, lse = trial.replayed(live, lse=case.lse)
        else:
            out, lse = trial.run(lse=case.lse)
        # what a padding row gives has no meaning but must not be an error
        return compare(trial.answer(), out, lse, len(trial.query) - padding, case.spec)


def poisoned(query: Tensor, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Outputs that hold NaN until they are written."""
    out = torch.full(query.shape, math.nan, dtype=query.dtype, device=query.device)
    lse = torch.full(query.shape[:2], math.nan, dtype=torch.float32, device=query.device) if with_lse else None
    return out, lse


def tolerance(answer: Answer, dtype: torch.dtype, spec: AttentionSpec) -> Tensor:
    """``[T]``: the error allowed in a token's output.

    Three times the error that rounding alone makes (`Answer.noise`), since kernels round in other places
    and to other maxima; and a floor where that error is zero by luck: an eighth of the dtype's unit for a value near 1, which
    for a soft cap covers the hardware's tanh (relative error 2^-11 of each score) too. In float32 1e-4.
    """
    if dtype == torch.float32:
        return 3 * answer.noise + 1e-4
    unit = torch.finfo(dtype).eps
    floor = max(unit / 8, 2.0**-10 if spec.soft_cap is None else 2.0**-8)
    return 3 * answer.noise + floor


def compare(answer: Answer, out: Tensor, lse: Tensor | None, tokens: int, spec: AttentionSpec) -> dict[str, Any]:
    """Errors over the first `tokens` tokens; NaN where anything was left unwritten.

    ``error`` is the largest of the output against float32 and ``output_of_tolerance`` the largest share of what `tolerance`
    allows; above 1 is a failure. ``lse_error`` and ``lse_of_tolerance`` say the same of the lse, where there is one, and
    ``of_tolerance`` is the larger share.
    """
    error = (out.float() - answer.out).abs().amax((1, 2))[:tokens]
    share = float((error / tolerance(answer, out.dtype, spec)[:tokens]).max())
    found = {"error": float(error.max()), "output_of_tolerance": share, "of_tolerance": share}
    if lse is not None:
        # scores are float32 sums of exact products; a soft cap adds the hardware's tanh
        allowed = 2e-3 if spec.soft_cap is None else 1e-2
        found["lse_error"] = float((lse - answer.lse)[:tokens].abs().max())
        found["lse_of_tolerance"] = found["lse_error"] / allowed
        found["of_tolerance"] = max(share, found["lse_of_tolerance"], key=nan_first)
    return found


def nan_first(value: float) -> float:
    """A key for `max` by which NaN is the largest."""
    return math.inf if math.isnan(value) else value


def passed(values: dict[str, Any]) -> bool:
    """Whether `compare`'s figures are within what is allowed; NaN is not."""
    return bool(values["of_tolerance"] <= 1)
