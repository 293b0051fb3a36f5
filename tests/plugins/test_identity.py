from __future__ import annotations

import pytest
from enginebay.errors import PluginMismatchError
from enginebay.plugins.identity import PluginIdentity, compare_plugin_sets

A = PluginIdentity("attention", "acme", "eb-acme", version="1.0")
LOCAL = PluginIdentity("attention", "mine", "/x/mine.py", sha256="ab" * 32)


def test_equal_sets_pass_in_any_order() -> None:
    compare_plugin_sets([A, LOCAL], [LOCAL, A])


def test_says_who_it_is() -> None:
    assert str(A) == "attention:acme (eb-acme 1.0)"
    assert str(LOCAL) == "attention:mine (/x/mine.py sha256:abababababab)"
    assert LOCAL.is_local
    assert not A.is_local


@pytest.mark.parametrize(
    ("parent", "own", "complaint"),
    [
        ([A], [], "resolved eb-acme 1.0, this process has none"),
        ([], [A], "resolved none, this process has eb-acme 1.0"),
        ([A], [PluginIdentity("attention", "acme", "eb-acme", version="2.0")], "eb-acme 1.0, this .* eb-acme 2.0"),
        ([A], [PluginIdentity("attention", "acme", "other", version="1.0")], "eb-acme 1.0, this .* other 1.0"),
        ([LOCAL], [PluginIdentity("attention", "mine", "/x/mine.py", sha256="cd" * 32)], "abab.* has .*cdcd"),
    ],
)
def test_difference_names_both_c10(parent: list[PluginIdentity], own: list[PluginIdentity], complaint: str) -> None:
    with pytest.raises(PluginMismatchError, match=complaint):
        compare_plugin_sets(parent, own)
