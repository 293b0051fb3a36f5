"""Weight maps: templates between module paths."""

from __future__ import annotations

import pytest
from enginebay.errors import ModelError
from enginebay.loading.name_map import WeightMap


def test_without_renames_a_path_is_its_own() -> None:
    assert WeightMap().checkpoint_module("model.layers.0.mlp.down_proj") == "model.layers.0.mlp.down_proj"


def test_the_first_template_that_matches_a_whole_path_wins() -> None:
    names = WeightMap(
        renames=(
            ("model.layers.{i}.mlp.{which}_proj", "transformer.h.{i}.ff.{which}"),
            ("model.{rest*}", "transformer.{rest}"),
        )
    )
    assert names.checkpoint_module("model.layers.7.mlp.up_proj") == "transformer.h.7.ff.up"
    assert names.checkpoint_module("model.layers.7.norm") == "transformer.layers.7.norm"
    assert names.checkpoint_module("lm_head") == "lm_head"


def test_a_field_is_one_segment_and_dots_are_literal() -> None:
    names = WeightMap(renames=(("a.{x}.b", "c.{x}"),))
    assert names.checkpoint_module("a.1.2.b") == "a.1.2.b"
    assert names.checkpoint_module("aX1Xb") == "aX1Xb"


def test_a_field_that_the_pattern_lacks_is_refused() -> None:
    with pytest.raises(ModelError, match=r"uses \{y\}"):
        WeightMap(renames=(("a.{x}", "b.{y}"),)).checkpoint_module("a.1")


def test_ignored_patterns_match_whole_names() -> None:
    names = WeightMap(ignored=("*.rotary_emb.inv_freq",))
    assert names.is_ignored("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not names.is_ignored("model.layers.0.self_attn.rotary_emb.inv_freq_scale")
