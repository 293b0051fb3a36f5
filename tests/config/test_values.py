"""Merging: precedence is positional, and nothing that was given is dropped."""

from __future__ import annotations

from typing import Any

from enginebay.config.values import Given, Source, Tree, find_source, merge, plain
from hypothesis import given
from hypothesis import strategies as st

YAML = Source("yaml", "engine.yaml:7")
CLI = Source("cli", "--set x=1")

scalars = st.one_of(st.none(), st.booleans(), st.just(0), st.just(""), st.integers(), st.text(max_size=3))


def trees(source: Source) -> st.SearchStrategy[Tree]:
    keys = st.sampled_from("abc")
    leaves: st.SearchStrategy[Any] = scalars.map(lambda v: Given(v, source))
    nodes = st.recursive(leaves, lambda inner: st.dictionaries(keys, inner, min_size=1, max_size=3), max_leaves=8)
    return st.dictionaries(keys, nodes, max_size=3)


def leaves(tree: Tree, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Given]:
    out: dict[tuple[str, ...], Given] = {}
    for key, value in tree.items():
        out.update(leaves(value, (*path, key)) if isinstance(value, dict) else {(*path, key): value})
    return out


@given(trees(YAML), trees(CLI))
def test_c3_the_upper_layer_holds_and_the_lower_shows_elsewhere(base: Tree, over: Tree) -> None:
    """C1, C2, C3: None, false, 0 and "" given above are values; below them everything not touched stays."""
    merged, upper, lower = leaves(merge(base, over)), leaves(over), leaves(base)
    assert upper.items() <= merged.items()
    for path, value in merged.items():
        assert upper.get(path, lower.get(path)) == value
    for path in lower.keys() - merged.keys():
        shadowed = [p for p in upper if p[: len(path)] == path or path[: len(p)] == p]
        assert shadowed, path


@given(trees(YAML))
def test_merge_with_nothing_changes_nothing(tree: Tree) -> None:
    assert merge(tree, {}) == merge({}, tree) == tree


@given(trees(YAML), trees(CLI), trees(YAML))
def test_merge_leaves_its_arguments_alone(a: Tree, b: Tree, c: Tree) -> None:
    before = (repr(a), repr(b), repr(c))
    merge(merge(a, b), c)
    assert (repr(a), repr(b), repr(c)) == before


def test_overriding_one_phase_leaves_the_named_backend_to_the_other() -> None:
    base: Tree = {"attention": {"backend": Given("torch", YAML)}}
    over: Tree = {"attention": {"backend": {"decode": Given("flashinfer", CLI)}}}
    merged = merge(base, over)
    assert plain(merged) == {"attention": {"backend": {"prefill": "torch", "decode": "flashinfer"}}}
    assert find_source(merged, ("attention", "backend", "prefill")) == YAML


def test_overriding_one_phase_of_a_group_leaves_the_named_backend_to_the_other() -> None:
    base: Tree = {"attention": {"backend": {"groups": {"sliding": Given("torch", YAML)}}}}
    over: Tree = {"attention": {"backend": {"groups": {"sliding": {"decode": Given("triton", CLI)}}}}}
    assert plain(merge(base, over)) == {
        "attention": {"backend": {"groups": {"sliding": {"prefill": "torch", "decode": "triton"}}}}
    }


def test_find_source_looks_up_then_down() -> None:
    tree: Tree = {"a": {"b": Given([1], YAML)}}
    assert find_source(tree, ("a", "b")) == find_source(tree, ("a", "b", 0)) == find_source(tree, ("a",)) == YAML
    assert find_source(tree, ("a", "c")) is None
    assert find_source({}, ()) is None


def test_sources_in_words() -> None:
    assert [str(s) for s in (YAML, CLI, Source("python"), Source("default"))] == [
        "engine.yaml:7",
        "--set x=1",
        "Python argument",
        "default",
    ]
