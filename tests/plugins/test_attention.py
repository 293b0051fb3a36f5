from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from enginebay.errors import ResolutionError
from enginebay.plugins.attention import Wish, resolve_attention
from enginebay.plugins.identity import PluginIdentity
from enginebay.plugins.loader import BrokenPlugin, LoadedPlugin
from enginebay.plugins.records import HND, NHD, AttentionRecord, KVLayout
from enginebay.plugins.report import report_text
from enginebay.plugins.requirements import AttentionSpec, Hardware, Requirements
from enginebay.plugins.selection import AttentionPart, AttentionSelection
from hypothesis import given
from hypothesis import strategies as st

if TYPE_CHECKING:
    from tests.plugins.conftest import FakeSite

FULL = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)
SLIDING = replace(FULL, window=8)
PHASES = ("decode", "prefill")
OTHER = KVLayout("OTHER", ("kv", "blocks", "block", "kv_heads", "head_dim"))


def choose(wanted: str | Mapping[str, str], requirements: Requirements, site: FakeSite) -> AttentionSelection:
    """Names for all parts, by phase, by group or by ``group.phase``; the rest is auto."""
    groups = sorted({spec.cache_kind for spec in requirements.attention})
    wishes: dict[AttentionPart, Wish] = {}
    for group, phase in itertools.product(groups, PHASES):
        names = dict.fromkeys((phase,), wanted) if isinstance(wanted, str) else wanted
        name = names.get(f"{group}.{phase}", names.get(group, names.get(phase)))
        wishes[group, phase] = Wish() if name is None else Wish(name, "yaml")
    return resolve_attention(wishes, requirements, site.loader())


@pytest.fixture
def two_groups(requirements: Requirements) -> Requirements:
    return replace(requirements, attention=(FULL, SLIDING))


def test_one_name_serves_all_phases(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.attention("acme", record="layouts=(HND, NHD), kernel_blocks=(32,)")
    chosen = choose("acme", requirements, fake_site)
    assert chosen.record(("full", "decode")) is chosen.record(("full", "prefill"))
    (selection,) = chosen.selections
    assert (selection.bay, selection.source) == ("attention", "yaml")
    assert (chosen.layout.name, chosen.block_size, chosen.kv_dtype) == ("HND", 32, "float32")


def test_auto_takes_one_where_one_is_best(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.attention("acme", record="priority=5")
    fake_site.attention("slow")
    (selection,) = choose({}, requirements, fake_site).selections
    assert selection.chosen is not None
    assert (selection.bay, selection.chosen.name, selection.source) == ("attention", "acme", "auto")
    assert [r.name for r in selection.rejected] == ["slow"]


def test_auto_takes_the_best_of_each_phase(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.attention("fast", record="priority=5, phases=('decode',), kernel_blocks=(64,)")
    fake_site.attention("all")
    chosen = choose({}, requirements, fake_site)
    assert (chosen.record(("full", "decode")).name, chosen.record(("full", "prefill")).name) == ("fast", "all")
    assert [s.bay for s in chosen.selections] == ["attention.decode", "attention.prefill"]
    assert chosen.block_size == 64


def test_auto_gives_up_priority_for_agreement_and_says_so(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.attention("alien", record="priority=5, phases=('decode',), layouts=(HND,)")
    fake_site.attention("all", record="layouts=(NHD,)")
    chosen = choose({"prefill": "all"}, requirements, fake_site)
    assert chosen.record(("full", "decode")).name == "all"
    (alien,) = (r for r in chosen.parts["full", "decode"].rejected if r.name == "alien")
    assert [reason.code for reason in alien.reasons] == ["kv_cache"]
    assert "no KV layout in common" in str(alien.reasons[0])
    assert "all" in str(alien.reasons[0])


def test_auto_finds_the_only_pair_that_agrees(fake_site: FakeSite, requirements: Requirements) -> None:
    """Choosing the best prefill first would leave decode without a partner."""
    fake_site.attention("greedy", record="priority=9, phases=('prefill',), layouts=(HND,)")
    fake_site.attention("p", record="phases=('prefill',)")
    fake_site.attention("d", record="phases=('decode',)")
    chosen = choose({}, requirements, fake_site)
    assert (chosen.record(("full", "prefill")).name, chosen.record(("full", "decode")).name) == ("p", "d")


def test_a_name_for_each_phase(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.attention("p", record="phases=('prefill',)")
    fake_site.attention("d", record="phases=('decode',)")
    wishes = {("full", "decode"): Wish("d", "cli"), ("full", "prefill"): Wish("p", "yaml")}
    chosen = resolve_attention(wishes, requirements, fake_site.loader())
    assert {s.bay: s.source for s in chosen.selections} == {"attention.prefill": "yaml", "attention.decode": "cli"}
    assert list(chosen.records) == ["d", "p"]


def test_named_pair_that_cannot_share_a_cache_is_refused_with_what_would_work(
    fake_site: FakeSite, requirements: Requirements
) -> None:
    fake_site.attention("p", record="layouts=(NHD,)")
    fake_site.attention("d", record="layouts=(HND,)")
    fake_site.attention("other", record="layouts=(HND,), phases=('prefill',)")
    with pytest.raises(ResolutionError) as caught:
        choose({"prefill": "p", "decode": "d"}, requirements, fake_site)
    assert str(caught.value).splitlines() == [
        "the attention backends read one KV cache, but have no KV layout in common:",
        "  attention.decode: d: HND",
        "  attention.prefill: p: NHD",
        "attention.decode (d) cannot share with attention.prefill (p)",
        "What would work, each by itself:",
        "  attention.backend.decode: p",
        "  attention.backend.prefill: d or other",
        "  attention.backend: d or p",
    ]


def test_no_pair_agrees(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.attention("p", record="phases=('prefill',), layouts=(NHD,)")
    fake_site.attention("d", record="phases=('decode',), layouts=(HND,)")
    with pytest.raises(ResolutionError, match=r"no KV layout in common(?s:.*)No installed backend fits all of it\."):
        choose({}, requirements, fake_site)


def test_name_that_lacks_a_phase_is_refused(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.attention("d", record="phases=('decode',)")
    with pytest.raises(ResolutionError, match=r"phase: wanted prefill(?s:.*)attention\.backend\.prefill"):
        choose("d", requirements, fake_site)


def test_phase_that_nobody_serves(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.attention("d", record="phases=('decode',)")
    with pytest.raises(ResolutionError, match=r"attention\.prefill: no installed plugin fits"):
        choose({}, requirements, fake_site)


def test_a_tie_is_left_to_the_user_c13(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.attention("one")
    fake_site.attention("two")
    with pytest.raises(ResolutionError, match=r"equal priority(?s:.*)attention\.backend: one \(eb-one 1\.0\) or two"):
        choose({}, requirements, fake_site)


def test_users_block_size_decides_who_fits(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.attention("wide", record="priority=5, kernel_blocks=(64,)")
    fake_site.attention("fine")
    fixed = replace(requirements, block_size=32)
    chosen = choose({}, fixed, fake_site)
    assert (chosen.record(("full", "decode")).name, chosen.block_size) == ("fine", 32)


# --- priorities by phase ---------------------------------------------------------------------------------------------


def test_a_priority_may_differ_by_phase(fake_site: FakeSite, two_groups: Requirements) -> None:
    """A backend that is best at prefill, one that is best at decode, and others that are neither."""
    fake_site.attention("flash", record="priority=15, phase_priority={'prefill': 30}, window=True")
    fake_site.attention("infer", record="priority=20, window=True")
    fake_site.attention("plain", record="window=True")
    chosen = choose({}, two_groups, fake_site)
    assert [(s.bay, s.chosen and s.chosen.name) for s in chosen.selections] == [
        ("attention.decode", "infer"),
        ("attention.prefill", "flash"),
    ]
    assert "not infer: priority: it fits, but its priority 20 is below 30" in report_text(chosen.selections)


def test_a_best_backend_without_its_library_is_passed_over_with_the_reason(
    fake_site: FakeSite, requirements: Requirements
) -> None:
    missing = "requires=('no_such_library',), install=\"'enginebay[flash]'\""
    fake_site.attention("flash", record=f"phase_priority={{'prefill': 30}}, {missing}")
    fake_site.attention("infer", record="priority=20")
    (selection,) = choose({}, requirements, fake_site).selections
    assert selection.chosen is not None
    assert selection.chosen.name == "infer"
    text = report_text([selection])
    assert "not flash: missing_module: wanted no_such_library" in text
    assert "(pip install 'enginebay[flash]')" in text


# --- groups of layers ------------------------------------------------------------------------------------------------


def test_groups_with_one_answer_are_one_line(fake_site: FakeSite, two_groups: Requirements) -> None:
    fake_site.attention("acme", record="window=True")
    for chosen in (choose("acme", two_groups, fake_site), choose({}, two_groups, fake_site)):
        assert [s.bay for s in chosen.selections] == ["attention"]
        assert {chosen.record(part).name for part in chosen.parts} == {"acme"}


def test_a_group_is_asked_for_its_own_layers_only(fake_site: FakeSite, two_groups: Requirements) -> None:
    fake_site.attention("plain", record="priority=9")
    fake_site.attention("windowed", record="window=True")
    chosen = choose({}, two_groups, fake_site)
    assert [(s.bay, s.chosen and s.chosen.name) for s in chosen.selections] == [
        ("attention.full", "plain"),
        ("attention.sliding", "windowed"),
    ]
    with pytest.raises(ResolutionError, match=r"plain \(eb-plain 1\.0\), named by yaml(?s:.*)window 8(?s:.*)windowed"):
        choose("plain", two_groups, fake_site)


@pytest.mark.parametrize(
    ("wanted", "bays"),
    [
        ({"sliding": "b"}, {"attention.full": "a", "attention.sliding": "b"}),
        ({"sliding": "b", "decode": "a", "prefill": "a"}, {"attention.full": "a", "attention.sliding": "b"}),
        ({"decode": "b"}, {"attention.decode": "b", "attention.prefill": "a"}),
        (
            {"sliding.decode": "b"},
            {"attention.full.decode": "a", "attention.sliding.decode": "b", "attention.prefill": "a"},
        ),
        (
            {"sliding.decode": "b", "full.decode": "a", "full.prefill": "b", "sliding.prefill": "a"},
            {
                "attention.full.decode": "a",
                "attention.full.prefill": "b",
                "attention.sliding.decode": "b",
                "attention.sliding.prefill": "a",
            },
        ),
    ],
)
def test_what_is_named_for_a_group_holds_for_it_alone(
    fake_site: FakeSite, two_groups: Requirements, wanted: dict[str, str], bays: dict[str, str]
) -> None:
    fake_site.attention("a", record="priority=5, window=True")
    fake_site.attention("b", record="window=True")
    chosen = choose(wanted, two_groups, fake_site)
    assert {s.bay: s.chosen and s.chosen.name for s in chosen.selections} == bays


def test_groups_that_cannot_share_a_cache_are_refused_with_what_would_work(
    fake_site: FakeSite, two_groups: Requirements
) -> None:
    fake_site.attention("common", record="window=True, layouts=(NHD,)")
    fake_site.attention("exotic", record="window=True, layouts=(HND,)")
    fake_site.attention("both", record="window=True, layouts=(HND, NHD), priority=-1")
    with pytest.raises(ResolutionError) as caught:
        choose({"sliding": "exotic", "decode": "common", "prefill": "common"}, two_groups, fake_site)
    text = str(caught.value)
    assert "attention.full (common) cannot share with attention.sliding (exotic)" in text
    assert "\n  attention.backend.groups.full: both or exotic\n" in text
    assert "\n  attention.backend.groups.sliding: both or common\n" in text


def test_a_named_group_decides_what_auto_can_take(fake_site: FakeSite, two_groups: Requirements) -> None:
    fake_site.attention("common", record="priority=9, window=True, layouts=(NHD,)")
    fake_site.attention("exotic", record="window=True, layouts=(HND,)")
    fake_site.attention("both", record="window=True, layouts=(HND, NHD), priority=-1")
    chosen = choose({"sliding": "exotic"}, two_groups, fake_site)
    assert chosen.layout == HND
    assert {part: chosen.record(part).name for part in chosen.parts} == {
        ("full", "decode"): "exotic",
        ("full", "prefill"): "exotic",
        ("sliding", "decode"): "exotic",
        ("sliding", "prefill"): "exotic",
    }
    (common,) = (r for r in chosen.parts["full", "decode"].rejected if r.name == "common")
    assert "it cannot share a KV cache with exotic" in str(common.reasons[0])


def test_a_tie_in_one_group_names_that_group_c13(fake_site: FakeSite, two_groups: Requirements) -> None:
    fake_site.attention("plain", record="priority=9")
    fake_site.attention("one", record="window=True")
    fake_site.attention("two", record="window=True")
    with pytest.raises(ResolutionError) as caught:
        choose({}, two_groups, fake_site)
    assert str(caught.value).splitlines() == [
        "attention: auto cannot choose between plugins of equal priority. Name one:",
        "  attention.backend.groups.sliding: one (eb-one 1.0) or two (eb-two 1.0)",
    ]


def test_a_part_that_nobody_serves_is_named(fake_site: FakeSite, two_groups: Requirements) -> None:
    fake_site.attention("plain")
    with pytest.raises(ResolutionError, match=r"attention\.sliding: no installed plugin fits(?s:.*)window 8"):
        choose({}, two_groups, fake_site)


# --- what auto takes, by law -----------------------------------------------------------------------------------------


class Given:
    """A loader of given records."""

    def __init__(self, records: list[AttentionRecord]) -> None:
        self.plugins = [LoadedPlugin(PluginIdentity("attention", r.name, r.name, "1"), r, r.name) for r in records]

    def candidates(self, kind: str) -> tuple[list[LoadedPlugin], list[BrokenPlugin]]:
        return self.plugins, []


@st.composite
def backends(draw: st.DrawFn) -> list[AttentionRecord]:
    """Up to five, whose priorities make no two combinations equal in sum."""
    count = draw(st.integers(1, 5))
    priorities = iter(draw(st.permutations([3**k for k in range(2 * count)])))
    return [
        AttentionRecord(
            name=f"b{i}",
            summary="fake",
            factory=print,
            api_version=0,
            dtypes=("float32",),
            kv_dtypes=("float32",),
            phases=draw(st.sampled_from([PHASES, ("decode",), ("prefill",)])),
            phase_priority={"decode": next(priorities), "prefill": next(priorities)},
            layouts=tuple(draw(st.sampled_from([[NHD], [HND], [OTHER], [NHD, HND], [HND, OTHER]]))),
            window=draw(st.booleans()),
        )
        for i in range(count)
    ]


@given(backends())
def test_auto_takes_the_greatest_sum_of_priorities_that_agrees(records: list[AttentionRecord]) -> None:
    groups = {"full": FULL, "sliding": SLIDING}
    parts = list(itertools.product(groups, PHASES))
    able = [[r for r in records if phase in r.phases and (group == "full" or r.window)] for group, phase in parts]
    sums = [
        sum(r.phase_priorities()[phase] for r, (_, phase) in zip(combination, parts, strict=True))
        for combination in itertools.product(*able)
        if set.intersection(*({layout.name for layout in r.layouts} for r in combination))
    ]
    requirements = Requirements(
        hardware=Hardware(device="cpu"), dtype="float32", kv_dtype="float32", attention=(FULL, SLIDING)
    )
    loader: Any = Given(records)
    wishes = dict.fromkeys(parts, Wish())
    if not sums:
        with pytest.raises(ResolutionError):
            resolve_attention(wishes, requirements, loader)
        return
    chosen = resolve_attention(wishes, requirements, loader)
    assert sum(chosen.record(part).phase_priorities()[part[1]] for part in parts) == max(sums)
    assert all(chosen.layout in chosen.record(part).layouts for part in parts)
