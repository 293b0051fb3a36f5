from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from enginebay.errors import PluginConflictError, PluginError, PluginMismatchError, PluginNotFoundError

if TYPE_CHECKING:
    from tests.plugins.conftest import FakeSite

HEAD = "from enginebay import hookimpl\nfrom enginebay.plugins.records import *\n"
LOCAL = (
    HEAD + "@hookimpl\ndef enginebay_attention_backends():\n"
    "    return [AttentionRecord(name='mine', summary='s', factory=print, api_version=0,"
    " dtypes=('float32',), kv_dtypes=('float32',))]\n"
)
SCHEDULER = "SchedulerRecord(name={!r}, summary='s', factory=print, api_version=0)"


def test_loads_once_and_only_what_was_asked_for(fake_site: FakeSite) -> None:
    fake_site.attention("acme")
    fake_site.attention("rest")
    loader = fake_site.loader()
    loaded = loader.load("attention", "acme")
    assert str(loaded.identity) == "attention:acme (eb-acme 1.0)"
    assert loaded.record.name == "acme"
    assert loader.load("attention", "acme") is loaded
    assert "eb_rest" not in sys.modules


def test_one_module_serves_several_kinds_and_names(fake_site: FakeSite) -> None:
    fake_site.module(
        "eb_multi",
        LOCAL
        + "@hookimpl\ndef enginebay_schedulers():\n"
        + f"    return [{SCHEDULER.format('a')}, {SCHEDULER.format('b')}]\n",
    )
    points = {"attention": {"mine": "eb_multi"}, "scheduler": {"a": "eb_multi", "b": "eb_multi"}}
    fake_site.dist_info("eb-multi", "1.0", points)
    loader = fake_site.loader()
    assert loader.load("scheduler", "b").record.name == "b"
    assert loader.load("attention", "mine").record.kind == "attention"
    assert loader.load("scheduler", "a").record.name == "a"
    assert len(loader.manager.get_plugins()) == 1


def test_same_name_in_two_kinds_loads_both(fake_site: FakeSite) -> None:
    """pluggy's own loader skips the second in silence."""
    fake_site.attention("acme")
    fake_site.other("scheduler", "enginebay_schedulers", SCHEDULER.format("acme"), "acme")
    loader = fake_site.loader()
    assert loader.load("attention", "acme").record.kind == "attention"
    assert loader.load("scheduler", "acme").record.kind == "scheduler"


def test_an_object_in_a_module_can_be_the_plugin(fake_site: FakeSite) -> None:
    fake_site.module(
        "eb_object",
        HEAD
        + "class Plugin:\n    @hookimpl\n    def enginebay_schedulers(self):\n"
        + f"        return [{SCHEDULER.format('obj')}]\nplugin = Plugin()\n",
    )
    fake_site.dist_info("eb-object", "1.0", {"scheduler": {"obj": "eb_object:plugin"}})
    assert fake_site.loader().load("scheduler", "obj").record.name == "obj"


def test_broken_import_carries_the_original_error_c8(fake_site: FakeSite) -> None:
    fake_site.broken_import()
    with pytest.raises(PluginError, match=r"attention:broken \(eb-broken 1\.0") as caught:
        fake_site.loader().load("attention", "broken")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert "a_module_that_nobody_has" in str(caught.value)
    assert "eb_broken.py:3" in str(caught.value)


def test_exit_at_import_is_a_plugin_error_c8(fake_site: FakeSite) -> None:
    fake_site.attention("quitter", body="raise SystemExit(3)")
    with pytest.raises(PluginError, match="SystemExit: 3"):
        fake_site.loader().load("attention", "quitter")


def test_missing_module_names_the_shadowed_copy_c9(fake_site: FakeSite) -> None:
    early, live = fake_site.stale()
    with pytest.raises(PluginError) as caught:
        fake_site.loader().load("attention", "old")
    assert str(early) in str(caught.value)
    assert str(live) in str(caught.value)


def test_misspelt_hook_is_refused_and_unregistered(fake_site: FakeSite) -> None:
    fake_site.misspelt_hook()
    fake_site.attention("fine")
    loader = fake_site.loader()
    with pytest.raises(PluginError) as caught:
        loader.load("attention", "misspelt")
    text = str(caught.value)
    assert "attention:misspelt (eb-misspelt 1.0" in text
    assert "'enginebay_attention_backend' is not a hook" in text
    assert "Did you mean 'enginebay_attention_backends'?" in text
    assert loader.manager.get_plugins() == set()
    assert loader.load("attention", "fine").record.name == "fine"


def test_wrong_hook_argument_is_refused(fake_site: FakeSite) -> None:
    body = "@hookimpl\ndef enginebay_step_finished(setp): pass"
    fake_site.attention("acme", body=body)
    loader = fake_site.loader()
    with pytest.raises(PluginError, match="'setp'"):
        loader.load("attention", "acme")
    assert loader.manager.get_plugins() == set()


def test_forgotten_decorator_is_named(fake_site: FakeSite) -> None:
    fake_site.module("eb_bare", "def enginebay_schedulers():\n    return []\n")
    fake_site.dist_info("eb-bare", "1.0", {"scheduler": {"bare": "eb_bare"}})
    with pytest.raises(PluginError, match="enginebay_schedulers is there, but lacks the @hookimpl decorator"):
        fake_site.loader().load("scheduler", "bare")


def test_missing_provision_hook_is_named(fake_site: FakeSite) -> None:
    fake_site.module("eb_only", LOCAL)
    fake_site.dist_info("eb-only", "1.0", {"scheduler": {"only": "eb_only"}})
    with pytest.raises(PluginError, match="does not implement enginebay_schedulers"):
        fake_site.loader().load("scheduler", "only")


def test_wrong_api_version_names_both_numbers_c12(fake_site: FakeSite) -> None:
    fake_site.wrong_api()
    with pytest.raises(PluginError, match=r"eb-future 1\.0.* needs attention API 2, this host has 0"):
        fake_site.loader().load("attention", "future")


def test_import_of_a_vanished_part_of_enginebay_is_explained_c12(fake_site: FakeSite) -> None:
    fake_site.attention("old", body="import enginebay.interfaces_of_long_ago")
    with pytest.raises(PluginError, match="written for another version of enginebay"):
        fake_site.loader().load("attention", "old")


def test_record_field_of_another_api_is_explained_c12(fake_site: FakeSite) -> None:
    fake_site.attention("new", record="telepathy=True")
    with pytest.raises(PluginError, match=r"telepathy.*another API") as caught:
        fake_site.loader().load("attention", "new")
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        ("[42]", "must return SchedulerRecord objects, not 42"),
        ("42", "enginebay_schedulers failed: TypeError"),
        (f"[{SCHEDULER.format('other')}]", "returned no record named 'x', but 'other'"),
        (f"[{SCHEDULER.format('x')}, {SCHEDULER.format('x')}]", "two records named 'x'"),
        (SCHEDULER.format("x"), r"must return a list of SchedulerRecord objects; put 'x' in \[\]"),
        (f"[{SCHEDULER.format('auto')}]", "named 'auto': .* name it otherwise"),
        (f"[{SCHEDULER.format('')}]", "named '': .* name it otherwise"),
        (
            "[SchedulerRecord(name='x', summary='s', factory=5, api_version=0)]",
            "the factory of 'x' is 5; give a function",
        ),
        ("[ModelRecord(name='x', summary='s', factory=print, api_version=0)]", "must return SchedulerRecord objects"),
    ],
)
def test_wrong_records_are_refused(fake_site: FakeSite, returned: str, complaint: str) -> None:
    fake_site.module("eb_x", f"{HEAD}@hookimpl\ndef enginebay_schedulers():\n    return {returned}\n")
    fake_site.dist_info("eb-x", "1.0", {"scheduler": {"x": "eb_x"}})
    with pytest.raises(PluginError, match=complaint):
        fake_site.loader().load("scheduler", "x")


def test_candidates_keep_the_broken_ones_with_reasons_c8(fake_site: FakeSite) -> None:
    fake_site.clashing()
    fake_site.broken_import()
    fake_site.attention("fine")
    fake_site.attention("off")
    loaded, broken = fake_site.loader("off").candidates("attention")
    assert [p.record.name for p in loaded] == ["fine"]
    assert {(b.name, b.code) for b in broken} == {("acme", "conflict"), ("broken", "broken"), ("off", "disabled")}


def test_local_file_joins_the_candidates(fake_site: FakeSite, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOCAL)
    loader = fake_site.loader()
    own = loader.add_local("./mine.py", base=tmp_path)
    assert loader.add_local(str(tmp_path / "mine.py")) == own
    identity = loader.load("attention", "mine").identity
    assert identity.distribution == str(tmp_path / "mine.py")
    assert len(identity.sha256) == 64
    assert loader.names("attention") == ("mine",)
    with pytest.raises(PluginNotFoundError, match=r"(?s)Did you mean 'mine'.*found: mine \(.*mine\.py sha256:"):
        loader.load("attention", "mime")


@pytest.mark.parametrize("returned", ["[]", "None"])
def test_a_local_file_that_adds_nothing_is_refused(fake_site: FakeSite, tmp_path: Path, returned: str) -> None:
    (tmp_path / "none.py").write_text(f"{HEAD}@hookimpl\ndef enginebay_schedulers():\n    return {returned}\n")
    loader = fake_site.loader()
    for _ in range(2):
        with pytest.raises(PluginError, match=r"none\.py: its hooks return no record"):
            loader.add_local("none.py", base=tmp_path)


def test_a_local_file_may_only_observe(fake_site: FakeSite, tmp_path: Path) -> None:
    (tmp_path / "watch.py").write_text(f"{HEAD}@hookimpl\ndef enginebay_engine_stopped():\n    pass\n")
    assert fake_site.loader().add_local("watch.py", base=tmp_path).name == "watch"


def test_local_file_against_an_installed_name_is_a_clash(fake_site: FakeSite, tmp_path: Path) -> None:
    fake_site.attention("mine")
    (tmp_path / "mine.py").write_text(LOCAL)
    loader = fake_site.loader()
    loader.add_local("mine.py", base=tmp_path)
    with pytest.raises(PluginConflictError, match=r"(?s)mine\.py sha256.*eb-mine 1\.0"):
        loader.load("attention", "mine")


def test_parent_and_child_load_the_same_set_c10(fake_site: FakeSite, tmp_path: Path) -> None:
    fake_site.attention("acme")
    (tmp_path / "mine.py").write_text(LOCAL)
    parent = fake_site.loader()
    parent.add_local("mine.py", base=tmp_path)
    chosen = [parent.load("attention", name).identity for name in ("acme", "mine")]
    resolved = parent.identities(chosen)
    assert {i.kind for i in resolved} == {"attention", "local"}
    assert fake_site.loader().load_set(resolved) == resolved


def test_child_without_the_plugin_says_so_c10(fake_site: FakeSite) -> None:
    info = fake_site.attention("acme")
    parent = fake_site.loader()
    resolved = parent.identities([parent.load("attention", "acme").identity])
    (info / "entry_points.txt").unlink()
    with pytest.raises(PluginMismatchError, match=r"attention:acme: the parent resolved eb-acme 1\.0, .* has none"):
        fake_site.loader().load_set(resolved)


def test_child_with_another_version_names_both_c10(fake_site: FakeSite) -> None:
    info = fake_site.attention("acme")
    parent = fake_site.loader()
    resolved = parent.identities([parent.load("attention", "acme").identity])
    metadata = info / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 1.1"))
    with pytest.raises(PluginMismatchError, match=r"resolved eb-acme 1\.0, this process has eb-acme 1\.1"):
        fake_site.loader().load_set(resolved)


def test_child_with_an_edited_local_file_names_both_c10(fake_site: FakeSite, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOCAL)
    parent = fake_site.loader()
    parent.add_local("mine.py", base=tmp_path)
    resolved = parent.identities([])
    (tmp_path / "mine.py").write_text(LOCAL.replace("'s'", "'t'"))
    with pytest.raises(PluginMismatchError, match=r"(?s)local:mine.*sha256:\w+, this process has .*sha256:\w+"):
        fake_site.loader().load_set(resolved)
