"""The laws of a scheduler: of a policy that steers the built-in mechanics, or of a whole scheduler in their place."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError

from enginebay.conformance.scheduler import scenes
from enginebay.conformance.scheduler.arrangement import Arrangement, Load
from enginebay.conformance.scheduler.lives import lives
from enginebay.conformance.scheduler.options import watched
from enginebay.conformance.scheduler.purity import assert_pure, changes, in_any_order, key_fault, sample, snapshot
from enginebay.conformance.scheduler.repetition import same_again
from enginebay.conformance.scheduler.scenes import STATES, State
from enginebay.conformance.scheduler.simulator import accounting, context_for
from enginebay.conformance.scheduler.survey import Fault, smaller, survey
from enginebay.conformance.scheduler.trial import make_policy, make_scheduler, simulate, takes_priority
from enginebay.conformance.scheduler.watch import OutOfScope, Topic, Watch
from enginebay.conformance.suite import Conformance, Settings, cases_from
from enginebay.errors import RequestError
from enginebay.interfaces.scheduler import SchedulingPolicy
from enginebay.plugins.records import Kind, SchedulerRecord


@dataclass(frozen=True)
class Case:
    """A scene and how many steps may be in flight in it."""

    concurrent: int
    state: State | None = None

    def __str__(self) -> str:
        return f"{self.state}, {self.concurrent} in flight" if self.state else f"{self.concurrent} in flight"


class SchedulerConformance(Conformance):
    """What every scheduler keeps: a policy together with the built-in mechanics, or a scheduler that replaces them.

    Most laws are about one thing each in the same few hundred lives of a simulated engine (`lives`), which are lived once.
    """

    kind: ClassVar[Kind] = "scheduler"
    decisive: ClassVar[tuple[str, ...]] = ("everybody_ends", "everybody_gets_its_own_tokens")

    # --- the record

    def test_factory_gives_what_the_record_says(self, record: SchedulerRecord, runs_here: None) -> None:
        """The record's factory builds a `SchedulingPolicy` or a `Scheduler`, as its `depth` says."""
        context = context_for(Arrangement(), accounting(Arrangement()), record.options())
        if record.depth == "policy":
            make_policy(record, context)
        else:
            make_scheduler(record, context)

    def test_every_option_is_read(self, record: SchedulerRecord, runs_here: None) -> None:
        """No option is accepted and ignored: each one declared is read by somebody, and others are refused (C6)."""
        with pytest.raises(ValidationError):
            record.options(no_such_option=1)
        options, read = watched(record.options)
        for life in lives(1, 16, priorities=takes_priority(record), concurrent=1, large=False):
            with contextlib.suppress(OutOfScope):  # what it read up to there counts
                life.live(simulate(record, life.arrangement, Watch(()), options=options))
        ignored = sorted(set(record.options.model_fields) - read)
        assert not ignored, f"options that nothing reads: {', '.join(ignored)}"

    # --- a policy

    def test_admission_keys_are_pure(self, record: SchedulerRecord, runs_here: None) -> None:
        """`admission_key` gives finite numbers that depend on the request alone: not on calls before, nor on the clock."""
        policy, other = policies(record)
        requests = sample()
        before = snapshot(requests)
        keys = [policy.admission_key(request) for request in requests]
        for key in keys:
            assert not key_fault(key), key_fault(key)
        sorted(keys)
        ask = functools.partial(in_any_order, requests)
        assert_pure(keys, lambda p: ask(p.admission_key), policy, other, "admission_key")
        assert not (found := changes(requests, before)), f"admission_key changed {found}"

    def test_victims_are_pure(self, record: SchedulerRecord, runs_here: None) -> None:
        """`choose_victim` gives one of those it was given, `may_preempt` a bool; both change nothing and are pure."""
        policy, other = policies(record)
        requests = sample()
        before = snapshot(requests)
        groups = [requests[start:end] for start in range(4) for end in range(start + 1, len(requests) + 1)]
        kept = [list(group) for group in groups]

        def ask(asked: SchedulingPolicy) -> list[Any]:
            victims = in_any_order(groups, asked.choose_victim)
            for group, victim in zip(groups, victims, strict=True):
                assert any(victim is one for one in group), (
                    f"choose_victim gave {victim!r}, who is not among those running"
                )
            return [*victims, *(asked.may_preempt(a, b) for a in requests for b in requests if a is not b)]

        answers = ask(policy)
        assert all(isinstance(answer, bool) for answer in answers[len(groups) :]), "may_preempt must give a bool"
        assert_pure(answers, ask, policy, other, "choose_victim or may_preempt")
        assert groups == kept, "choose_victim changed the list that it was given"
        assert not (found := changes(requests, before)), f"choose_victim or may_preempt changed {found}"

    def test_quotas_are_pure(self, record: SchedulerRecord, runs_here: None) -> None:
        """`prefill_quota` gives a whole number that depends on its arguments alone."""
        policy, other = policies(record)
        steps = [(rows, budget) for rows in (0, 1, 7, 200) for budget in (0, 1, 16, 8192)]
        ask = functools.partial(in_any_order, steps)
        quotas = [policy.prefill_quota(*step) for step in steps]
        assert all(isinstance(quota, int) for quota in quotas), f"prefill_quota gave {quotas}"
        assert_pure(quotas, lambda p: ask(lambda step: p.prefill_quota(*step)), policy, other, "prefill_quota")

    # --- scenes

    def test_the_same_again_gives_the_same_schedule(
        self, record: SchedulerRecord, settings: Settings, runs_here: None
    ) -> None:
        """Equal requests give equal steps, slots and blocks: whatever their ids, their addresses, and the clock."""
        number = 48 if settings.level == "core" else 400
        most = 3 if record.async_scheduling else 1
        for life in lives(2, number, priorities=takes_priority(record), concurrent=most, large=False):
            difference = same_again(record, life)
            assert not difference, f"{difference}\nin the life\n  {life}"

    @cases_from("steps_in_flight")
    def test_steps_in_flight_take_placeholders(self, record: SchedulerRecord, runs_here: None, case: Case) -> None:
        """Of a record with async_scheduling: steps go out with a token still to come, and no token differs for it (C14)."""
        with judged_elsewhere():
            sim = simulate(record, Arrangement(concurrent=case.concurrent), Watch(()))
            sim.offer(Load((1, 2, 3), 12))
            out = [sim.step() for _ in range(case.concurrent)]
            assert all(out), f"only {sum(map(bool, out))} of {case.concurrent} steps go out before the first retires"
            positions = [int(step.num_computed_tokens[0]) for step in out if step is not None]
            assert positions == [0, *range(3, 2 + case.concurrent)], f"steps begin at tokens {positions}"
            sim.run()
            alone = simulate(record, Arrangement(), Watch(()))
            alone.offer(Load((1, 2, 3), 12))
            alone.run()
            assert sim.tokens("r0") == alone.tokens("r0")

    @cases_from("states")
    def test_abort_ends_a_request_in_every_state(
        self, record: SchedulerRecord, settings: Settings, runs_here: None, case: Case
    ) -> None:
        """Waiting, mid-prompt, decoding, in flight, preempted: one delta, no row or token after it, all blocks back (C47)."""
        assert case.state is not None
        make = functools.partial(simulate, record)
        with judged_elsewhere():
            free = []
            for aborts in (True, False):
                found = scenes.in_state(lambda sizes: make(sizes, Watch(["abort"])), case.state, case.concurrent)
                if found is None:
                    pytest.skip(f"no request was ever {case.state}")
                sim, request = found
                if aborts:
                    sim.abort(request.request_id, request.request_id)
                    sim.abort(request.request_id, "nobody")
                sim.run()
                free.append(sim.kv.num_free_blocks)
            assert free[0] == free[1], f"idle with {free[0]} free blocks after an abort, with {free[1]} without it"
        self.no_fault(settings, "abort")

    @cases_from("presses")
    def test_a_preempted_request_loses_nothing(
        self, record: SchedulerRecord, settings: Settings, runs_here: None, case: Case
    ) -> None:
        """Sent back in whatever state, in no step meanwhile (C18), it goes on where it was, its tokens in flight delivered."""
        scene = scenes.pressed_mid_prompt if case.state == "mid-prompt" else scenes.pressed
        with judged_elsewhere():
            sim = scene(lambda sizes: simulate(record, sizes, Watch(["preemption"])), case.concurrent)
            if scenes.to_preemption(sim) is None:
                pytest.skip("it preempted nobody, though the pool was too small for all")
            sim.run()
        self.no_fault(settings, "preemption")

    @cases_from("depths")
    def test_an_end_at_a_block_edge_returns_every_block(
        self, record: SchedulerRecord, runs_here: None, case: Case
    ) -> None:
        """A stop token that fills a block, found with further steps in flight, costs no block more than one amid it (C24)."""
        with judged_elsewhere():
            free = []
            for outputs in (3, 4):  # with a prompt of 5 and blocks of 4: the edge, and one beyond
                sim = simulate(record, Arrangement(concurrent=case.concurrent), Watch(()))
                sim.offer(scenes.ends_at((1, 2, 3, 4, 5), outputs))
                sim.run()
                free.append(sim.kv.num_free_blocks)
            assert free[0] >= free[1], (
                f"{free[0]} blocks are free after an end at a block's edge, {free[1]} after another"
            )

    @cases_from("depths")
    def test_equals_keep_their_order(self, record: SchedulerRecord, runs_here: None, case: Case) -> None:
        """Of equal requests the first to come is seated first and, when blocks are short, never sent back."""
        with judged_elsewhere():
            sim = scenes.pressed(lambda sizes: simulate(record, sizes, Watch(["seniority"])), case.concurrent)
            sim.run()
            seated: list[str] = []
            for step in sim.outputs:
                seated += [new.request_id for new in step.new_requests if new.request_id not in seated]
            assert seated == ["r0", "r1", "r2"], f"equal requests r0, r1, r2 were seated in the order {seated}"
            assert len(sim.received["r0"].seated) == 1, "the first of equal requests was sent back for the others"

    def test_priority_is_honoured_or_refused(self, record: SchedulerRecord, runs_here: None) -> None:
        """A request with a priority is refused by a `RequestError` that names it, or served before less urgent ones (C20)."""
        sim = simulate(record, Arrangement(max_num_seqs=1), Watch(()))
        with judged_elsewhere():
            sim.offer(Load((1, 2, 3), 20))
            sim.run(steps=2)
            refusal = ""
            try:
                sim.queue(Load((1, 2, 3), 20, priority=2), "less_urgent")
                sim.queue(Load((1, 2, 3), 20, priority=-2), "urgent")
            except RequestError as error:
                refusal = str(error)
            if refusal:
                assert "urgent" in refusal, f"the refusal names no request: {refusal}"
                return
            sim.run()
            order = list(dict.fromkeys(name for step in sim.history for name in step))
            assert order.index("urgent") < order.index("less_urgent"), "a priority was accepted and ignored"

    # --- lives

    def test_steps_are_well_formed(self, settings: Settings, runs_here: None) -> None:
        """Rows are ordered decode | extend | prefill, each from where its last ended, sampling where the known tokens end."""
        self.no_fault(settings, "form")

    def test_only_running_requests_have_rows(self, settings: Settings, runs_here: None) -> None:
        """No row is of a request that waits, has ended, or is unknown."""
        self.no_fault(settings, "running")

    def test_steps_keep_to_the_token_budget(self, settings: Settings, runs_here: None) -> None:
        """No step exceeds max_num_batched_tokens, or max_prefill_tokens beside decode rows; unchunked prompts stay whole."""
        self.no_fault(settings, "budget")

    def test_seats_are_bounded(self, settings: Settings, runs_here: None) -> None:
        """Slots are below max_num_seqs, and nobody gets one in which another runs or that a step in flight names."""
        self.no_fault(settings, "seats")

    def test_steps_in_flight_are_bounded(self, settings: Settings, runs_here: None) -> None:
        """With max_concurrent_batches steps out, `schedule` gives None until one retires."""
        self.no_fault(settings, "flight")

    def test_blocks_cover_what_is_computed(self, settings: Settings, runs_here: None) -> None:
        """Every position that a row reads or writes has a block of the pool, and nobody writes what another reads."""
        self.no_fault(settings, "blocks")

    def test_nothing_is_returned_or_published_before_its_step_retires(
        self, settings: Settings, runs_here: None
    ) -> None:
        """`free` names no slot of a step in flight, and `commit` no token that only a step in flight computes (C24)."""
        self.no_fault(settings, "retirement")

    def test_nobody_is_skipped(self, settings: Settings, runs_here: None) -> None:
        """A step that decodes decodes every running request for which there are tokens and blocks (C19)."""
        self.no_fault(settings, "skipping")

    def test_nobody_is_overtaken(self, settings: Settings, runs_here: None) -> None:
        """Nobody is seated before an equal that came first, or before one that the policy's order puts first (C20)."""
        self.no_fault(settings, "seniority")

    def test_what_can_never_run_is_refused(self, settings: Settings, runs_here: None) -> None:
        """`add` raises `RequestTooLargeError` for what exceeds max_model_len or the pool, and takes all else (C21, C25)."""
        self.no_fault(settings, "refusal")

    def test_requests_are_kept_up_to_date(self, settings: Settings, runs_here: None) -> None:
        """A request's status, slot, outputs, end, preemptions and cache hits are what happened, and its first delta says so."""
        self.no_fault(settings, "fields")

    def test_stats_are_true(self, settings: Settings, runs_here: None) -> None:
        """At any time `stats` and `has_unfinished` say what waits, runs, is in flight, is free, and was preempted."""
        self.no_fault(settings, "stats")

    def test_everybody_gets_its_own_tokens(self, settings: Settings, runs_here: None) -> None:
        """Whatever the arrangement, a request gets the tokens it gets alone, once, in order, up to its stop token or length."""
        self.no_fault(settings, "answers")

    def test_every_block_comes_back(self, settings: Settings, runs_here: None) -> None:
        """When nothing is unfinished, every block is free, and none was given back twice (C24)."""
        self.no_fault(settings, "conservation")

    def test_everybody_ends(self, settings: Settings, runs_here: None) -> None:
        """Whatever was admitted ends, nothing waits while nothing runs (C22), and nothing is raised."""
        self.no_fault(settings, "liveness")

    # --- cases

    @classmethod
    def steps_in_flight(cls, record: SchedulerRecord, settings: Settings) -> list[Case]:
        """More than one step in flight, where the record says so."""
        return [case for case in cls.depths(record, settings) if case.concurrent > 1]

    @classmethod
    def depths(cls, record: SchedulerRecord, settings: Settings) -> list[Case]:
        """How many steps may be in flight."""
        return [Case(n) for n in ((1, 2, 3) if record.async_scheduling else (1,))]

    @classmethod
    def states(cls, record: SchedulerRecord, settings: Settings) -> list[Case]:
        """Every state of a request."""
        return [Case(depth.concurrent, state) for depth in cls.depths(record, settings) for state in STATES]

    @classmethod
    def presses(cls, record: SchedulerRecord, settings: Settings) -> list[Case]:
        """States to be preempted in."""
        states: tuple[State, ...] = ("mid-prompt", "decoding")
        return [Case(depth.concurrent, state) for depth in cls.depths(record, settings) for state in states]

    # --- helpers

    @classmethod
    @functools.cache
    def faults(cls, settings: Settings) -> dict[Topic, Fault]:
        """What went wrong in the plugin's lives."""
        record = cls.tried()[0]
        assert isinstance(record, SchedulerRecord)
        return survey(record, settings.level)

    def no_fault(self, settings: Settings, topic: Topic) -> None:
        """Fail if one of the lives broke `topic`."""
        fault, record = self.faults(settings).get(topic), self.tried()[0]
        assert isinstance(record, SchedulerRecord)
        if fault is not None:
            pytest.fail(str(smaller(record, topic, fault)), pytrace=False)


@contextlib.contextmanager
def judged_elsewhere() -> Iterator[None]:
    """A scene that ends early because something broke that another law is about proves nothing: it is skipped."""
    try:
        yield
    except OutOfScope as broken:
        pytest.skip(f"the scene broke another law first ({broken})")


def policies(record: SchedulerRecord) -> tuple[SchedulingPolicy, SchedulingPolicy]:
    """Two policies of the plugin's; a whole scheduler skips the law."""
    if record.depth != "policy":
        pytest.skip("a whole scheduler has no policy")
    sizes = Arrangement()
    context = context_for(sizes, accounting(sizes), record.options())
    return make_policy(record, context), make_policy(record, context)
