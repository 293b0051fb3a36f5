from __future__ import annotations

import re
from pathlib import Path

import pytest
from enginebay.errors import PluginConflictError, PluginError
from enginebay.plugins.catalogue import Catalogue
from enginebay.plugins.registry import KnownPlugin
from enginebay.scaffold.names import PluginNames, new_names
from hypothesis import assume, given
from hypothesis import strategies as st

NOTHING = Catalogue(copies=())


def test_a_name_gives_the_distribution_the_module_and_the_class() -> None:
    names = new_names("attention", "my_fast2", NOTHING)
    assert (names.distribution, names.module, names.title) == ("enginebay-my-fast2", "enginebay_my_fast2", "MyFast2")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("MyAttn", "such as 'my_attn'"),
        ("my-attn", "such as 'my_attn'"),
        ("2fast", "such as 'fast'"),
        ("_acme", "such as 'acme'"),
        ("a__b", "such as 'a_b'"),
        ("acme_", "such as 'acme'"),
        ("Class", "begins with a letter$"),
        ("", "begins with a letter$"),
        ("[", "begins with a letter$"),
        ("../acme", "such as 'acme'"),
        ("acme\n", "such as 'acme'"),
        ("prüfer", "such as 'pr_fer'"),
        ("auto", "the host's word for its own choice; choose another name, such as 'my_auto'"),
        ("class", "'class' is a word of Python's"),
        ("on", "'on' is a word of YAML's"),
        ("null", "'null' is a word of YAML's"),
        ("a" * 33, "has 33 characters; a plugin's name has at most 32"),
    ],
)
def test_what_cannot_be_a_name_is_refused_and_a_near_one_named(name: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        new_names("attention", name, NOTHING)


@given(st.text(max_size=40))
def test_what_is_accepted_is_an_identifier_that_yaml_and_a_shell_leave_as_it_is(name: str) -> None:
    try:
        names = new_names("attention", name, NOTHING)
    except PluginError:
        return
    assert re.fullmatch("[a-z][a-z0-9_]*", name)
    assert names.module.isidentifier()
    assert names.title.isidentifier()


@given(st.from_regex(r"[a-z][a-z0-9]{0,9}(_[a-z0-9]{1,5}){0,2}", fullmatch=True))
def test_distributions_and_modules_of_two_names_differ(name: str) -> None:
    other = name.replace("_", "")
    assume(other != name)
    assert PluginNames(name).distribution != PluginNames(other).distribution
    assert PluginNames(name).module != PluginNames(other).module


def test_the_name_of_an_installed_plugin_is_taken(tmp_path: Path) -> None:
    info = tmp_path / "acme_kernels-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: acme-kernels\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[enginebay.attention]\nacme_fast = acme\n")
    catalogue = Catalogue.discover([str(tmp_path)], known=[], disabled="")
    with pytest.raises(PluginConflictError, match=r"attention:acme_fast is installed already \(acme-kernels 1\.0 at "):
        new_names("attention", "acme_fast", catalogue)
    assert new_names("scheduler", "acme_fast", catalogue).name == "acme_fast"


def test_the_name_of_a_known_plugin_is_taken() -> None:
    known = KnownPlugin(
        kind="attention", name="away", summary="far", install="pip install away", source="", devices=(), status="stable"
    )
    with pytest.raises(PluginConflictError, match=r"attention:away is the name of a known plugin \(far\)"):
        new_names("attention", "away", Catalogue(copies=(), known=(known,)))


def test_an_installed_module_s_name_is_taken() -> None:
    with pytest.raises(PluginConflictError, match="a module named enginebay_llama is installed already"):
        new_names("scheduler", "llama", NOTHING)
