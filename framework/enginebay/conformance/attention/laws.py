"""The laws of an attention backend."""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from enginebay.conformance.attention import cases
from enginebay.conformance.attention.cases import Case, Work
from enginebay.conformance.attention.steps import Answer, Row
from enginebay.conformance.attention.trial import (
    Trial,
    check,
    compare,
    passed,
    poisoned,
    tolerance,
)
from enginebay.conformance.claims import Undeclared, home, require_accepted, require_refused
from enginebay.conformance.suite import Conformance, Settings, cases_from, hardware
from enginebay.interfaces.attention import AttentionBackend
from enginebay.interfaces.batch import NULL_BLOCK, GroupBatch
from enginebay.kernels.kv_write import reshape_and_cache
from enginebay.plugins.records import AttentionRecord, Kind

#: rows of the laws that are about other things than lengths: edges of a block of 16, and an odd one
DECODE = [Row(1, n) for n in (33, 1, 16, 17, 50)]
PREFILL = [Row(n, n) for n in (33, 1, 16)] + [Row(5, 22), Row(1, 9)]


class AttentionConformance(Conformance):
    """What every attention backend keeps. Cases are all pairs of what its record declares."""

    kind: ClassVar[Kind] = "attention"
    decisive: ClassVar[tuple[str, ...]] = ("output_equals_float32",)

    # --- the record

    def test_factory_gives_a_backend(self, record: AttentionRecord, settings: Settings, runs_here: None) -> None:
        """The record's factory builds an `AttentionBackend` for each phase that the record declares."""
        for case in _plain(record, settings):
            trial = Trial.of(record, case, [Row(1, 1)], torch.device(settings.device))
            assert isinstance(trial.backend(), AttentionBackend)

    def test_what_is_declared_is_accepted(self, record: AttentionRecord) -> None:
        """A demand within the record's own fields is refused for nothing but the machine."""
        require_accepted(record, cases.demand(record, home(record)))

    @cases_from("undeclared")
    def test_what_is_not_declared_is_refused(self, record: AttentionRecord, case: Undeclared) -> None:
        """A demand beyond the record's fields is refused, by a reason that says what was wanted and what would do."""
        here = home(record)
        beyond = cases.demand(record, **({"hardware": here} | dict(case.changes)))
        require_refused(record, beyond, cases.demand(record, here), case)

    @classmethod
    def undeclared(cls, record: AttentionRecord, settings: Settings) -> list[Undeclared]:
        """What the record lacks."""
        return cases.undeclared(record)

    # --- the answer

    @cases_from("declared")
    def test_output_equals_float32(self, record: AttentionRecord, settings: Settings, case: Case) -> None:
        """Over ragged rows at the edges of blocks, in blocks of random order, the output is that of the definition in float32.

        With every pair of what is declared: dtype, cache dtype and scale, heads, head size, block size, layout, window, soft
        cap, sinks, phase, whether lse is asked for, and captured or not.
        """
        found = _checked(record, case, settings)
        values = {name: found[name] for name in ("error", "output_of_tolerance")}
        assert found["output_of_tolerance"] <= 1, f"{case}: {values} (1 is what rounding explains)"

    @cases_from("declared_with_lse")
    def test_lse_is_the_natural_log_sum(self, record: AttentionRecord, settings: Settings, case: Case) -> None:
        """``lse`` is the natural logarithm of the sum of exponentials of the scaled, capped scores, the sink's included."""
        found = _checked(record, case, settings)
        assert found["lse_of_tolerance"] <= 1, f"{case}: {found}"

    @classmethod
    def declared(cls, record: AttentionRecord, settings: Settings) -> list[Case]:
        """All pairs of what the record declares."""
        return cases.declared_cases(record, settings, hardware(settings.device))

    @classmethod
    def declared_with_lse(cls, record: AttentionRecord, settings: Settings) -> list[Case]:
        """Those of them that ask for lse, few without `--exhaustive`."""
        return [case for case in cls.declared(record, settings) if case.lse]

    # --- what it reads and writes

    @cases_from("plain")
    def test_only_its_rows_tokens_are_read(self, record: AttentionRecord, settings: Settings, case: Case) -> None:
        """Blocks that no row holds may hold NaN, and what lies past a row's last token any finite number (canaries)."""
        trial = _trial(record, case, settings, spare=3)
        clean, _ = trial.run()
        held = torch.zeros(trial.cache.shape[:3], dtype=torch.bool)
        for row, length in enumerate(trial.batch.seq_lens_host.tolist()):
            for place in range(length):
                block = trial.batch.groups[0].block_table[row, place // case.block_size]
                held[int(block), :, place % case.block_size] = True
        in_use = held.any(-1).any(-1)
        # a number that would show: the largest that an fp8 cache holds
        stale = torch.where(held, 0.0, 448.0).to(trial.cache.device)
        noise = torch.where(in_use[:, None, None].to(stale.device), stale, math.nan)
        noise[NULL_BLOCK] = 448.0
        spoilt = torch.where(held[..., None, None].to(stale.device), trial.cache.float(), noise[..., None, None])
        trial.cache.copy_(spoilt.to(trial.cache.dtype))
        out, _ = trial.run()
        _assert_same(trial, out, clean, "what stands in the cache beside the rows' tokens changed the output")

    @cases_from("plain")
    def test_nothing_but_the_outputs_is_written(self, record: AttentionRecord, settings: Settings, case: Case) -> None:
        """Cache, queries and the batch are the core's: a backend reads them."""
        trial = _trial(record, case, settings)
        batch = trial.batch
        given = {
            "the cache": trial.cache,
            "the queries": trial.query,
            "block_table": batch.groups[0].block_table,
            "slot_mapping": batch.groups[0].slot_mapping,
            "query_start_loc": batch.query_start_loc,
            "seq_lens": batch.seq_lens,
            "positions": batch.positions,
        }
        before = {name: _bits(tensor) for name, tensor in given.items()}
        hosts = (batch.query_start_loc_host.copy(), batch.seq_lens_host.copy())
        trial.run(lse=True)
        for name, tensor in given.items():
            assert torch.equal(_bits(tensor), before[name]), f"{name} was changed"
        for host, copied in zip((batch.query_start_loc_host, batch.seq_lens_host), hosts, strict=True):
            assert np.array_equal(host, copied), "a host array was changed"

    @cases_from("plain")
    def test_rows_may_share_blocks(self, record: AttentionRecord, settings: Settings, case: Case) -> None:
        """Rows with a common prefix hold the same blocks (prefix caching)."""
        trial = _trial(record, case, settings)
        table = trial.batch.groups[0].block_table
        longest = int(trial.batch.seq_lens_host.argmax())
        for row, length in enumerate(trial.batch.seq_lens_host.tolist()):
            # all but the last block, which is a row's own
            shared = max(0, -(-length // case.block_size) - 1)
            table[row, :shared] = table[longest, :shared]
        out, _ = trial.run()
        _assert_answer(trial, out, "rows that share blocks got another answer")

    @cases_from("plain")
    def test_the_groups_own_block_table_is_read(self, record: AttentionRecord, settings: Settings, case: Case) -> None:
        """``batch.groups[context.group]`` is the backend's, not the first group."""
        trial = _trial(record, case, settings)
        own = trial.batch.groups[0]
        other = GroupBatch(torch.full_like(own.block_table, NULL_BLOCK), torch.full_like(own.slot_mapping, -1))
        expected = trial.answer()
        trial.batch = replace(trial.batch, groups=(other, own))
        out, _ = trial.run(backend=trial.backend(group=1))
        _assert_answer(trial, out, "a backend of cache group 1 read another group's blocks", expected)

    # --- what changes nothing

    @cases_from("plain")
    def test_the_batchs_composition_changes_no_row(
        self, record: AttentionRecord, settings: Settings, case: Case
    ) -> None:
        """A row alone, in another order, or beside others has one result."""
        trial = _trial(record, case, settings)
        whole, _ = trial.run()
        starts = trial.batch.query_start_loc_host
        pieces = [whole[int(starts[r]) : int(starts[r + 1])] for r in range(trial.batch.num_rows)]
        orders = [[r] for r in range(trial.batch.num_rows)] + [list(range(trial.batch.num_rows))[::-1]]
        for order in orders:
            part = trial.rows(order)
            out, _ = part.run()
            _assert_same(
                part, out, torch.cat([pieces[r] for r in order]), f"rows {order} of the batch on their own differ"
            )

    @cases_from("plain_prefill")
    def test_chunks_equal_the_whole(self, record: AttentionRecord, settings: Settings, case: Case) -> None:
        """A prompt computed in chunks, its keys and values written before each, gives what it gives in one piece."""
        device, length = torch.device(settings.device), 3 * case.block_size + 5
        whole = Trial.of(record, case, [Row(length, length)], device)
        full_cache = whole.cache
        expected, _ = whole.run()
        backend, outs, start = whole.backend(), [], 0
        state = backend.make_state(whole.bucket())
        # nothing is in the cache but what has been computed
        empty = replace(whole, cache=torch.zeros_like(full_cache))
        for end in (1, case.block_size + 2, 2 * case.block_size, length):
            chunk = replace(empty, query=whole.query[start:end], batch=_chunk(whole, start, end))
            slots = whole.batch.groups[0].slot_mapping[start:end]
            flat = full_cache[slots // case.block_size, :, slots % case.block_size]
            reshape_and_cache(flat, empty.cache, slots)
            outs.append(chunk.run(backend=backend, state=state)[0])
            start = end
        _assert_same(whole, torch.cat(outs), expected, "a prompt in chunks differs from the prompt in one piece")

    @cases_from("plain")
    def test_a_state_serves_the_next_step(self, record: AttentionRecord, settings: Settings, case: Case) -> None:
        """Plans of successive steps in one `PlanState` leave nothing behind: other lengths, blocks and fewer rows."""
        first = _trial(record, case, settings)
        backend = first.backend()
        state = backend.make_state(first.bucket())
        first.run(backend=backend, state=state)
        rows = [(r, int(n)) for r, n in enumerate(first.batch.seq_lens_host)]
        lens = np.diff(first.batch.query_start_loc_host)
        later = [Row(int(lens[r]), n) for r, n in rows[::-1][:-1]]
        second = Trial.of(record, case, later, torch.device(settings.device), seed=9)
        out, _ = second.run(backend=backend, state=state)
        _assert_answer(second, out, "the second step of a state got another answer")

    @cases_from("plain")
    def test_layers_of_a_group_share_a_plan(self, record: AttentionRecord, settings: Settings, case: Case) -> None:
        """After one plan each layer attends over its own cache, with its own scales and sinks."""
        trial = _trial(record, case, settings)
        backend = trial.backend()
        state = backend.make_state(trial.bucket())
        trial.run(backend=backend, state=state)
        other = replace(trial, cache=_like(trial.cache, trial.cache.flip(0)), layer=replace(trial.layer, index=1))
        out, _ = other.run(backend=backend, state=state, plan=False)
        _assert_answer(other, out, "a second layer of the plan got another answer")

    @cases_from("plain")
    def test_padding_rows_change_nothing(self, record: AttentionRecord, settings: Settings, case: Case) -> None:
        """Padding rows (one token, null block, slot -1) raise nothing and leave the others' results."""
        if case.phase != "decode":
            pytest.skip("only decode steps are padded")
        device = torch.device(settings.device)
        trial = Trial.of(record, case, DECODE, device, padding=3)
        out, _ = trial.run()
        real = trial.batch.num_tokens - 3
        found = compare(trial.answer(), out, None, real, case.spec)
        assert passed(found), f"rows beside padding got another answer: {found}"
        everything = Trial.of(record, case, [], device, padding=4)
        everything.run()

    @cases_from("plain")
    def test_host_lengths_are_read_as_declared(self, record: AttentionRecord, settings: Settings, case: Case) -> None:
        """``host_lens="none"`` reads no length on the host; ``"upper_bound"`` is right with lengths that are too large."""
        if record.host_lens == "exact":
            pytest.skip("the record declares that it reads exact lengths")
        trial = _trial(record, case, settings)
        expected = trial.answer()
        bound = trial.batch.seq_lens_host + 7
        if record.host_lens == "none":
            bound = np.full_like(bound, 2**30)
        trial.batch = replace(trial.batch, seq_lens_host=bound, max_seq_len=trial.batch.max_seq_len + 7)
        out, _ = trial.run()
        _assert_answer(trial, out, f"seq_lens_host is read as exact, the record says {record.host_lens!r}", expected)

    # --- on a GPU

    @cases_from("captured")
    def test_graph_replay_equals_eager(self, record: AttentionRecord, settings: Settings, case: Case) -> None:
        """A step captured on padding rows and replayed with other lengths and blocks gives the eager step's result."""
        device = torch.device(settings.device)
        trial = Trial.of(record, case, DECODE, device, padding=3)
        eager, _ = trial.run()
        live = Trial.of(record, case, [], device, padding=trial.batch.num_rows)
        for _ in range(2):
            out, _ = trial.replayed(live, lse=False)
            real = trial.batch.num_tokens - 3
            assert _share(trial, out[:real], eager[:real]) <= 1, "a replayed step differs from the eager one"

    @cases_from("captured")
    def test_nothing_waits_for_the_device(self, record: AttentionRecord, settings: Settings, case: Case) -> None:
        """Neither plan nor attend reads anything back from the device: the step in flight would have to end first."""
        trial = _trial(record, case, settings)
        backend = trial.backend()
        state = backend.make_state(trial.bucket())
        out, _ = poisoned(trial.query, False)
        for attempt in range(2):  # the first may compile and tune
            torch.cuda.set_sync_debug_mode("error" if attempt else "default")
            try:
                backend.plan(trial.batch, state)
                backend.attend(trial.layer, trial.query, trial.cache, trial.batch, state, out)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        _assert_answer(trial, out, "the step got another answer")

    # --- cases

    @classmethod
    def plain(cls, record: AttentionRecord, settings: Settings) -> list[Case]:
        """The plainest case of each kind of work."""
        return _plain(record, settings)

    @classmethod
    def plain_prefill(cls, record: AttentionRecord, settings: Settings) -> list[Case]:
        """That of whole prompts."""
        return [case for case in _plain(record, settings) if case.work == "prefill"]

    @classmethod
    def captured(cls, record: AttentionRecord, settings: Settings) -> list[Case]:
        """The plainest decode case, where it can be captured."""
        if settings.device != "cuda" or record.graph_support == "never":
            return []
        return [case for case in _plain(record, settings) if case.work == "decode"]


def _plain(record: AttentionRecord, settings: Settings) -> list[Case]:
    works: tuple[Work, ...] = ("decode", "prefill")
    found = (cases.plain_case(record, settings, work, hardware(settings.device)) for work in works)
    return [case for case in found if case is not None]


def _trial(record: AttentionRecord, case: Case, settings: Settings, spare: int = 0) -> Trial:
    rows = DECODE if case.work == "decode" else PREFILL
    return Trial.of(record, case, rows, torch.device(settings.device), seed=3, spare=spare)


@functools.lru_cache(maxsize=256)
def _checked(record: AttentionRecord, case: Case, settings: Settings) -> dict[str, Any]:
    """Run a case once for both laws about it."""
    return check(record, case, settings.device, _longest(settings))


def _longest(settings: Settings) -> int:
    return 700 if settings.device == "cuda" else 300 if settings.level == "full" else 70


def _chunk(whole: Trial, start: int, end: int) -> Any:
    """Tokens ``[start, end)`` of a step of one row, as a step of their own."""
    batch = whole.batch
    group = batch.groups[0]
    made = copy.copy(batch)
    made.num_tokens = made.max_query_len = end - start
    made.max_seq_len = end
    made.query_start_loc_host = np.array([0, end - start], dtype=np.int32)
    made.seq_lens_host = np.array([end], dtype=np.int32)
    made.query_start_loc = torch.from_numpy(made.query_start_loc_host).to(batch.query_start_loc.device)
    made.seq_lens = torch.from_numpy(made.seq_lens_host).to(batch.seq_lens.device)
    made.positions = batch.positions[start:end]
    made.groups = (GroupBatch(group.block_table, group.slot_mapping[start:end]),)
    return made


def _bits(tensor: Tensor) -> Tensor:
    """A copy that compares by bits, NaN and fp8 included."""
    return tensor.detach().clone().contiguous().view(torch.uint8)


def _like(tensor: Tensor, content: Tensor) -> Tensor:
    """`content` in memory of the strides of `tensor`."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(content)


def _share(trial: Trial, out: Tensor, other: Tensor) -> float:
    """The largest difference of two results as a share of what the arithmetic allows; NaN is infinite."""
    allowed = 2 * tolerance(trial.answer(), out.dtype, trial.case.spec)[: len(out)]
    share = float(((out.float() - other.float()).abs().amax((1, 2)) / allowed).max())
    return math.inf if math.isnan(share) else share


def _assert_same(trial: Trial, out: Tensor, other: Tensor, fault: str) -> None:
    share = _share(trial, out, other)
    assert share <= 1, f"{fault}: by {share:.3g} times what rounding explains"


def _assert_answer(trial: Trial, out: Tensor, fault: str, answer: Answer | None = None) -> None:
    found = compare(answer or trial.answer(), out, None, len(out), trial.case.spec)
    assert passed(found), (
        f"{fault}: off by {found['error']:.3g}, {found['of_tolerance']:.3g} times what rounding explains"
    )
