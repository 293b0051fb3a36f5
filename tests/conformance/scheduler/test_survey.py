"""Lives and scenes: they reach what they are for, are the same each time, and are made small when they break."""

from __future__ import annotations

import inspect
import re
from collections import Counter

import pytest
from enginebay.conformance.scheduler import laws, scenes, survey
from enginebay.conformance.scheduler.arrangement import Arrangement, Load
from enginebay.conformance.scheduler.lives import Action, Life, lives
from enginebay.conformance.scheduler.options import watched
from enginebay.conformance.scheduler.scenes import STATES, State
from enginebay.conformance.scheduler.trial import simulate, takes_priority
from enginebay.conformance.scheduler.watch import TOPICS, OutOfScope, Topic, Violation, Watch
from enginebay.plugins.records import SchedulerRecord
from enginebay_fcfs import enginebay_schedulers as fcfs
from enginebay_priority import enginebay_schedulers as priority
from pydantic import BaseModel

RECORDS = [*fcfs(), *priority()]


def mutant(name: str) -> SchedulerRecord:
    from scheduler_mutants import MUTANTS

    (record,) = (m.record for m in MUTANTS if m.name == name)
    assert isinstance(record, SchedulerRecord)
    return record


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_lives_reach_what_the_laws_are_about(record: SchedulerRecord) -> None:
    """A law about something that no life ever does would say nothing."""
    seen: Counter[str] = Counter()
    for life in lives(20, 160, priorities=takes_priority(record), concurrent=3, large=False):
        sim = simulate(record, life.arrangement)
        life.live(sim)
        got = sim.received.values()
        seen["preempted"] += any(g.request.num_preemptions for g in got)
        seen["found in the cache"] += any(map(any, (g.seated for g in got)))
        seen["aborted"] += any(g.finish_reason == "abort" for g in got)
        seen["stopped"] += any(g.finish_reason == "stop" for g in got)
        seen["refused"] += len(got) < sum(a.what == "add" for a in life.actions)
        seen["several in flight"] += life.arrangement.concurrent > 1
        seen["window"] += any(life.arrangement.windows)
        seen["whole prompts"] += not life.arrangement.chunked_prefill
    assert all(seen[what] >= 5 for what in seen), seen


def test_lives_are_the_same_each_time_and_the_first_of_many_are_those_of_few() -> None:
    few, many = (list(lives(3, n, priorities=True, concurrent=2, large=False)) for n in (8, 16))
    assert few == many[:8]
    assert len(set(many)) == 16


@pytest.mark.parametrize("concurrent", [1, 2, 3])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_scenes_reach_their_state(record: SchedulerRecord, state: State, concurrent: int) -> None:
    found = scenes.in_state(lambda sizes: simulate(record, sizes), state, concurrent)
    assert found is not None
    sim, request = found
    if state == "in flight":
        assert any(request.request_id in step.named for step in sim.flying)


def test_a_victim_is_amid_its_prompt_where_the_scene_says_so() -> None:
    sim = scenes.pressed_mid_prompt(lambda sizes: simulate(RECORDS[0], sizes), 1)
    victim = scenes.to_preemption(sim)
    assert victim is not None
    (seat,) = (seat for seat in sim.device.seats.values() if seat.request is victim)
    assert 0 < seat.computed < seat.num_prefill


def test_a_broken_life_is_made_small() -> None:
    record = mutant("queues_the_impossible")
    fault = survey.survey(record, "core")["refusal"]
    small = survey.smaller(record, "refusal", fault)
    assert len(small.life.actions) == 1
    assert small.life.actions[0].what == "add"
    assert "C21" in str(small)
    assert "Load(prompt=" in str(small)


def test_what_a_scheduler_raises_is_told_with_the_life() -> None:
    record = mutant("returns_a_policy")
    found = survey.lived(record, Life(Arrangement(), (Action("add", load=Load((1,), 1)),)))
    assert list(found) == ["liveness"]
    assert "must return a Scheduler" in found["liveness"]


def test_what_does_not_stop_a_life_hides_nothing_else() -> None:
    """A request field that is never kept is one fault, and the rest of the contract is still judged."""
    found = survey.survey(mutant("keeps_status"), "core")
    assert set(found) == {"fields"}
    notes: dict[Topic, str] = {}
    watch = Watch(notes=notes)
    watch.expect("fields", False, "first")
    watch.expect("fields", False, "second")
    assert notes == {"fields": "first [fields]"}


def test_only_what_is_watched_is_a_violation() -> None:
    watch = Watch(["budget"])
    with pytest.raises(Violation, match=r"3 of 2 \[budget\]"):
        watch.expect("budget", False, "{} of {}", 3, 2)
    with pytest.raises(OutOfScope):
        watch.expect("seats", False, "")
    watch.expect("stats", False, "")
    watch.expect("seats", True, "{}")


def test_every_topic_is_some_laws() -> None:
    """What is checked and asked for by nobody would be no law."""
    asked = set(re.findall(r'no_fault\(settings, "(\w+)"\)', inspect.getsource(laws)))
    wanted: set[Topic] = set(TOPICS)
    assert asked == wanted


def test_options_notice_who_reads_them() -> None:
    class Pair(BaseModel):
        left: int = 1
        right: int = 2

    options, read = watched(Pair)
    assert isinstance(options, Pair)
    assert read == set()
    assert options.left == 1
    assert read == {"left"}
    assert options.model_dump() == {"left": 1, "right": 2}
    assert read == {"left", "right"}
