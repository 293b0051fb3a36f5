from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from enginebay.errors import ConfigError, ResolutionError
from enginebay.plugins.attention import resolve_attention
from enginebay.plugins.requirements import Requirements

if TYPE_CHECKING:
    from tests.plugins.conftest import FakeSite


def test_one_name_serves_all_phases(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.attention("acme", record="layouts=(HND, NHD), kernel_blocks=(32,)")
    chosen = resolve_attention("acme", "yaml", requirements, fake_site.loader())
    assert chosen.record("decode") is chosen.record("prefill")
    (selection,) = chosen.selections
    assert (selection.bay, selection.source) == ("attention", "yaml")
    assert (chosen.layout.name, chosen.block_size, chosen.kv_dtype) == ("HND", 32, "float32")


def test_auto_takes_one_where_one_is_best(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.attention("acme", record="priority=5")
    fake_site.attention("slow")
    (selection,) = resolve_attention("auto", "default", requirements, fake_site.loader()).selections
    assert selection.chosen is not None
    assert (selection.bay, selection.chosen.name, selection.source) == ("attention", "acme", "auto")
    assert [r.name for r in selection.rejected] == ["slow"]


def test_auto_takes_the_best_of_each_phase(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.attention("fast", record="priority=5, phases=('decode',), kernel_blocks=(64,)")
    fake_site.attention("all")
    chosen = resolve_attention("auto", "default", requirements, fake_site.loader())
    assert (chosen.record("decode").name, chosen.record("prefill").name) == ("fast", "all")
    assert [s.bay for s in chosen.selections] == ["attention.decode", "attention.prefill"]
    assert chosen.block_size == 64


def test_auto_gives_up_priority_for_agreement_and_says_so(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.attention("alien", record="priority=5, phases=('decode',), layouts=(HND,)")
    fake_site.attention("all", record="layouts=(NHD,)")
    chosen = resolve_attention({"prefill": "all"}, "yaml", requirements, fake_site.loader())
    assert chosen.record("decode").name == "all"
    (alien,) = (r for r in chosen.phases["decode"].rejected if r.name == "alien")
    assert [reason.code for reason in alien.reasons] == ["kv_cache"]
    assert "no KV layout in common" in str(alien.reasons[0])
    assert "all" in str(alien.reasons[0])


def test_auto_finds_the_only_pair_that_agrees(fake_site: FakeSite, requirements: Requirements) -> None:
    """Choosing the best prefill first would leave decode without a partner."""
    fake_site.attention("greedy", record="priority=9, phases=('prefill',), layouts=(HND,)")
    fake_site.attention("p", record="phases=('prefill',)")
    fake_site.attention("d", record="phases=('decode',)")
    chosen = resolve_attention("auto", "default", requirements, fake_site.loader())
    assert (chosen.record("prefill").name, chosen.record("decode").name) == ("p", "d")


def test_a_name_for_each_phase(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.attention("p", record="phases=('prefill',)")
    fake_site.attention("d", record="phases=('decode',)")
    wanted, source = {"prefill": "p", "decode": "d"}, {"prefill": "yaml", "decode": "cli"}
    chosen = resolve_attention(wanted, source, requirements, fake_site.loader())
    assert {phase: s.source for phase, s in chosen.phases.items()} == {"prefill": "yaml", "decode": "cli"}


def test_named_pair_that_cannot_share_a_cache_is_refused(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.attention("p", record="layouts=(NHD,)")
    fake_site.attention("d", record="layouts=(HND,)")
    with pytest.raises(ResolutionError, match=r"no KV layout in common(?s:.*)attention\.backend"):
        resolve_attention({"prefill": "p", "decode": "d"}, "yaml", requirements, fake_site.loader())


def test_no_pair_agrees(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.attention("p", record="phases=('prefill',), layouts=(NHD,)")
    fake_site.attention("d", record="phases=('decode',), layouts=(HND,)")
    with pytest.raises(ResolutionError, match="no KV layout in common"):
        resolve_attention("auto", "default", requirements, fake_site.loader())


def test_name_that_lacks_a_phase_is_refused(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.attention("d", record="phases=('decode',)")
    with pytest.raises(ResolutionError, match=r"phase: wanted prefill(?s:.*)attention\.backend\.prefill"):
        resolve_attention("d", "yaml", requirements, fake_site.loader())


def test_phase_that_nobody_serves(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.attention("d", record="phases=('decode',)")
    with pytest.raises(ResolutionError, match=r"attention\.prefill: no installed plugin fits"):
        resolve_attention("auto", "default", requirements, fake_site.loader())


def test_a_tie_is_left_to_the_user_c13(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.attention("one")
    fake_site.attention("two")
    with pytest.raises(ResolutionError, match=r"equal priority(?s:.*)eb-one(?s:.*)eb-two(?s:.*)attention\.backend"):
        resolve_attention("auto", "default", requirements, fake_site.loader())


def test_unknown_phase_is_refused_with_a_suggestion(fake_site: FakeSite, requirements: Requirements) -> None:
    with pytest.raises(ConfigError, match=r"attention\.backend\.decod: not a phase.*Did you mean 'decode'"):
        resolve_attention({"decod": "x"}, "yaml", requirements, fake_site.loader())


def test_users_block_size_decides_who_fits(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.attention("wide", record="priority=5, kernel_blocks=(64,)")
    fake_site.attention("fine")
    fixed = replace(requirements, block_size=32)
    chosen = resolve_attention("auto", "default", fixed, fake_site.loader())
    assert (chosen.record("decode").name, chosen.block_size) == ("fine", 32)
