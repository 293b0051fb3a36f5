from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from enginebay.errors import PluginConflictError, PluginError, PluginNotFoundError
from enginebay.plugins.catalogue import DISABLE_VARIABLE, Catalogue
from enginebay.plugins.registry import KnownPlugin

if TYPE_CHECKING:
    from tests.plugins.conftest import FakeSite


def test_discovers_entry_points_without_importing(fake_site: FakeSite) -> None:
    path = fake_site.attention("acme", body="raise RuntimeError('imported')")
    (entry,) = fake_site.catalogue().entries
    assert (entry.kind, entry.name, entry.distribution, entry.version) == ("attention", "acme", "eb-acme", "1.0")
    assert entry.module == "eb_acme"
    assert entry.path == str(path)
    assert "eb_acme" not in sys.modules


def test_reads_a_value_with_attribute_and_extras(fake_site: FakeSite) -> None:
    fake_site.dist_info("eb-x", "1.0", {"attention": {"x": "pkg.mod : plugin.part [extra]"}})
    (entry,) = fake_site.catalogue().entries
    assert (entry.module, entry.attribute) == ("pkg.mod", "plugin.part")


def test_orders_by_kind_then_name(fake_site: FakeSite) -> None:
    fake_site.dist_info("eb-x", "1.0", {"scheduler": {"a": "m"}, "attention": {"z": "m", "B": "m", "a": "m"}})
    assert [(e.kind, e.name) for e in fake_site.catalogue().entries] == [
        ("attention", "a"),
        ("attention", "B"),
        ("attention", "z"),
        ("scheduler", "a"),
    ]


def test_default_search_is_sys_path(fake_site: FakeSite) -> None:
    fake_site.attention("acme")
    names = {(e.distribution, e.name) for e in Catalogue.discover().entries}
    assert ("eb-acme", "acme") in names
    assert ("enginebay", "torch") in names


def test_unknown_kind_is_kept_apart(fake_site: FakeSite) -> None:
    fake_site.dist_info("eb-x", "1.0", {"attenton": {"x": "m"}})
    catalogue = fake_site.catalogue()
    assert catalogue.entries == ()
    assert [e.kind for e in catalogue.foreign] == ["attenton"]


def test_unknown_name_lists_what_was_found_and_suggests_c9(fake_site: FakeSite) -> None:
    path = fake_site.attention("triton")
    with pytest.raises(PluginNotFoundError) as caught:
        fake_site.catalogue().find("attention", "trition")
    text = str(caught.value)
    assert "'trition'" in text
    assert "Did you mean 'triton'?" in text
    assert f"triton (eb-triton 1.0 at {path})" in text


def test_unknown_name_gets_its_install_line(fake_site: FakeSite) -> None:
    known = KnownPlugin(
        kind="attention",
        name="acme",
        summary="Acme's kernels",
        install="pip install eb-acme",
        source="https://example.org",
        devices=("cuda",),
        status="stable",
    )
    catalogue = Catalogue.discover([str(fake_site.root)], known=[known], disabled="")
    assert catalogue.not_installed == (known,)
    with pytest.raises(PluginNotFoundError, match=r"Acme's kernels.*not installed: pip install eb-acme"):
        catalogue.find("attention", "acme")
    with pytest.raises(PluginNotFoundError, match="Did you mean 'acme'"):
        catalogue.find("attention", "acmee")


def test_unknown_name_of_another_kind_says_so(fake_site: FakeSite) -> None:
    fake_site.attention("acme")
    with pytest.raises(PluginNotFoundError, match="attention:acme is of another kind"):
        fake_site.catalogue().find("scheduler", "acme")


def test_unknown_architecture_lists_the_supported_ones(fake_site: FakeSite) -> None:
    fake_site.dist_info("eb-lm", "1.0", {"model": {"LlamaForCausalLM": "m", "Qwen3ForCausalLM": "m"}})
    with pytest.raises(PluginNotFoundError) as caught:
        fake_site.catalogue().find("model", "LamaForCausalLM")
    text = str(caught.value)
    assert "architecture 'LamaForCausalLM'" in text
    assert "LlamaForCausalLM (eb-lm 1.0" in text
    assert "Qwen3ForCausalLM (eb-lm 1.0" in text


def test_stale_metadata_shadows_and_both_are_named_c9(fake_site: FakeSite) -> None:
    early, live = fake_site.stale()
    catalogue = fake_site.catalogue()
    assert [c.path for c in catalogue.copies] == [str(early)]
    assert [c.path for c in catalogue.shadowed_copies("eb-moved")] == [str(live)]
    with pytest.raises(PluginNotFoundError) as caught:
        catalogue.find("attention", "new")
    assert str(early) in str(caught.value)
    assert str(live) in str(caught.value)
    assert "shadowed" in str(caught.value)


def test_in_one_directory_the_higher_version_wins_c9(fake_site: FakeSite) -> None:
    fake_site.dist_info("eb-x", "1.10", {"attention": {"x": "m"}})
    fake_site.dist_info("eb-x", "1.9", {"attention": {"x": "m"}})
    catalogue = fake_site.catalogue()
    assert [c.version for c in catalogue.copies] == ["1.10"]
    assert [c.version for c in catalogue.shadowed] == ["1.9"]


def test_in_one_directory_a_copy_without_record_loses_c9(fake_site: FakeSite) -> None:
    fake_site.dist_info("eb-x", "2.0", {"attention": {"x": "m"}}, record=False)
    fake_site.dist_info("eb-x", "1.0", {"attention": {"x": "m"}})
    assert [c.version for c in fake_site.catalogue().copies] == ["1.0"]


def test_residue_without_metadata_never_shadows_c9(fake_site: FakeSite) -> None:
    residue = fake_site.dist_info("eb-x", "3.0", {}, metadata=False, record=False)
    fake_site.dist_info("eb-x", "1.0", {"attention": {"x": "m"}}, where=fake_site.folder("later"))
    catalogue = fake_site.catalogue()
    assert catalogue.find("attention", "x").version == "1.0"
    assert [c.path for c in catalogue.shadowed] == [str(residue)]


def test_unescaped_hyphens_in_a_folder_name_merge_nothing(fake_site: FakeSite) -> None:
    for name in ("one", "two"):
        info = fake_site.dist_info(f"eb-{name}", "1.0", {"attention": {name: "m"}})
        info.rename(info.with_name(f"eb-{name}-1.0.dist-info"))
    catalogue = fake_site.catalogue()
    assert [e.distribution for e in catalogue.entries] == ["eb-one", "eb-two"]
    assert catalogue.shadowed == ()


def test_one_directory_twice_on_the_path_is_no_duplicate(fake_site: FakeSite, tmp_path: Path) -> None:
    fake_site.attention("acme")
    link = tmp_path / "link"
    link.symlink_to(fake_site.root)
    catalogue = Catalogue.discover([str(fake_site.root), str(link)], known=(), disabled="")
    assert len(catalogue.entries) == 1
    assert catalogue.shadowed == ()


def test_unreadable_entry_points_do_not_stop_the_rest_c15(
    fake_site: FakeSite, caplog: pytest.LogCaptureFixture
) -> None:
    fake_site.attention("acme")
    bad = fake_site.dist_info("eb-bad", "1.0", {})
    (bad / "entry_points.txt").write_bytes(b"[enginebay.attention]\n\xff\xfe = m\n")
    assert [e.name for e in fake_site.catalogue().entries] == ["acme"]
    assert str(bad) in caplog.text


def test_clash_names_both_with_versions_and_others_work(fake_site: FakeSite) -> None:
    fake_site.clashing()
    fake_site.attention("fine")
    catalogue = fake_site.catalogue()
    assert catalogue.find("attention", "fine").distribution == "eb-fine"
    with pytest.raises(PluginConflictError) as caught:
        catalogue.find("attention", "acme")
    assert "acme-one 1.0 at" in str(caught.value)
    assert "acme-two 2.0 at" in str(caught.value)
    assert DISABLE_VARIABLE in str(caught.value)


def test_disabling_one_distribution_settles_a_clash(fake_site: FakeSite) -> None:
    fake_site.clashing()
    assert fake_site.catalogue("Acme_One").find("attention", "acme").distribution == "acme-two"


@pytest.mark.parametrize("word", ["acme", "attention:acme", "eb-acme", "EB_Acme", "other, acme ,"])
def test_disabled_by_name_kind_or_distribution(fake_site: FakeSite, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_site.attention("acme")
    monkeypatch.setenv(DISABLE_VARIABLE, word)
    catalogue = fake_site.catalogue(disabled=None)
    (entry,) = catalogue.entries
    assert catalogue.disabled_by(entry) is not None
    with pytest.raises(PluginError, match=rf"attention:acme \(eb-acme 1.0 .* switched off by {DISABLE_VARIABLE}="):
        catalogue.find("attention", "acme")


def test_disabling_another_kind_of_that_name_changes_nothing(fake_site: FakeSite) -> None:
    fake_site.attention("acme")
    catalogue = fake_site.catalogue("scheduler:acme")
    assert catalogue.find("attention", "acme").name == "acme"
    assert catalogue.unmatched_words == ("scheduler:acme",)
