from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from enginebay.errors import PluginConflictError, PluginError, PluginNotFoundError, ResolutionError
from enginebay.plugins.requirements import AttentionSpec, Requirements
from enginebay.plugins.resolver import resolve
from enginebay.plugins.selection import identities, switched_off

if TYPE_CHECKING:
    from tests.plugins.conftest import FakeSite

EXECUTOR = "ExecutorRecord(name={!r}, summary='s', factory=print, api_version=0, max_concurrent_batches={})"
SCHEDULER = "SchedulerRecord(name={!r}, summary='s', factory=print, api_version=0, async_scheduling={})"
QUANT = "QuantRecord(name={!r}, summary='s', factory=print, api_version=0, checkpoint_methods={!r})"
MODEL = "ModelRecord(name={!r}, summary='s', factory=print, api_version=0, max_tensor_parallel={})"


def sliding(requirements: Requirements) -> Requirements:
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=80, scale=0.125, window=128)
    return replace(requirements, attention=(spec,))


def test_explicit_choice_keeps_its_source_and_loads_nothing_else(
    fake_site: FakeSite, requirements: Requirements
) -> None:
    fake_site.attention("acme")
    fake_site.attention("rest", record="priority=9")
    selection = resolve("attention", "acme", "yaml", requirements, fake_site.loader())
    assert selection.chosen is not None
    assert (selection.chosen.name, selection.source, selection.rejected) == ("acme", "yaml", ())
    assert str(selection.identity) == "attention:acme (eb-acme 1.0)"
    assert "eb_rest" not in sys.modules


def test_explicit_choice_is_never_replaced_c17(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.attention("plain", record="head_dims=(64,)")
    fake_site.attention("rich", record="window=True")
    fake_site.attention("poor")
    with pytest.raises(ResolutionError) as caught:
        resolve("attention", "plain", "cli", sliding(requirements), fake_site.loader())
    text = str(caught.value)
    assert "plain (eb-plain 1.0), named by cli, does not fit" in text
    assert "head_dim: wanted 80, allowed 64" in text
    assert "window: wanted sliding window 128" in text
    assert "installed and fitting: rich (eb-rich 1.0)" in text
    assert "poor" not in text


def test_auto_takes_the_highest_priority_that_fits_and_explains_the_rest(
    fake_site: FakeSite, requirements: Requirements
) -> None:
    fake_site.attention("best", record="priority=9, devices=('cuda',)")
    fake_site.attention("good", record="priority=5")
    fake_site.attention("fair")
    fake_site.broken_import()
    selection = resolve("attention", "auto", "default", requirements, fake_site.loader())
    assert selection.chosen is not None
    assert (selection.chosen.name, selection.source) == ("good", "auto")
    reasons = {r.name: [reason.code for reason in r.reasons] for r in selection.rejected}
    assert reasons == {"best": ["device"], "fair": ["priority"], "broken": ["broken"]}
    (broken,) = (r for r in selection.rejected if r.name == "broken")
    assert "a_module_that_nobody_has" in str(broken.reasons[0])  # C8: loud
    assert "eb-broken 1.0" in broken.origin


def test_auto_survives_a_clash_that_nobody_asked_for(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.clashing()
    fake_site.attention("good")
    selection = resolve("attention", "auto", "default", requirements, fake_site.loader())
    assert selection.chosen is not None
    assert selection.chosen.name == "good"
    assert [(r.name, r.reasons[0].code) for r in selection.rejected] == [("acme", "conflict")]
    with pytest.raises(PluginConflictError):
        resolve("attention", "acme", "yaml", requirements, fake_site.loader())


def test_auto_reports_a_disabled_candidate(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.attention("good", record="priority=3")
    fake_site.attention("fair")
    selection = resolve("attention", "auto", "default", requirements, fake_site.loader("good"))
    assert selection.chosen is not None
    assert selection.chosen.name == "fair"
    assert [(r.name, r.reasons[0].code) for r in selection.rejected] == [("good", "disabled")]


def test_a_tie_is_left_to_the_user_c13(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.attention("one", record="priority=5")
    fake_site.attention("two", record="priority=5")
    fake_site.attention("low")
    with pytest.raises(ResolutionError) as caught:
        resolve("attention", "auto", "default", requirements, fake_site.loader())
    text = str(caught.value)
    assert "equal priority 5" in text
    assert "one (eb-one 1.0)" in text
    assert "Name one: attention.backend: one or two" in text
    assert resolve("attention", "two", "yaml", requirements, fake_site.loader()).chosen is not None


def test_none_fits_lists_every_candidate(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.attention("one", record="devices=('cuda',)")
    fake_site.attention("two", record="requires=('no_such_module_here',), install='two-kernels'")
    fake_site.broken_import()
    with pytest.raises(ResolutionError) as caught:
        resolve("attention", "auto", "default", requirements, fake_site.loader())
    text = str(caught.value)
    assert "device: wanted cpu, allowed cuda" in text
    assert "pip install two-kernels" in text
    assert "a_module_that_nobody_has" in text


def test_none_installed_says_so(fake_site: FakeSite, requirements: Requirements) -> None:
    with pytest.raises(ResolutionError, match="none is installed"):
        resolve("executor", "auto", "default", requirements, fake_site.loader())


def test_broken_plugin_asked_for_is_an_error_c8(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.broken_import()
    fake_site.attention("good")
    with pytest.raises(PluginError, match="a_module_that_nobody_has"):
        resolve("attention", "broken", "yaml", requirements, fake_site.loader())


def test_failing_check_of_a_record(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.attention("bad", record="check=lambda req: 1 / 0, priority=9")
    fake_site.attention("good")
    loader = fake_site.loader()
    with pytest.raises(PluginError, match=r"attention:bad \(eb-bad 1\.0\): its supports\(\) failed: ZeroDivisionError"):
        resolve("attention", "bad", "yaml", requirements, loader)
    selection = resolve("attention", "auto", "default", requirements, loader)
    assert selection.chosen is not None
    assert selection.chosen.name == "good"
    assert [(r.name, r.reasons[0].code) for r in selection.rejected] == [("bad", "broken")]


def test_a_library_that_is_too_old_is_named_with_both_versions(fake_site: FakeSite, requirements: Requirements) -> None:
    """An explicit choice stops there; auto takes the next and says why."""
    needs = "requires_dist=('acme-kernels>=2.1',), install='\\'eb-fast[kernels]\\''"
    fake_site.dist_info("acme-kernels", "2.0.3", {})
    fake_site.attention("fast", record=f"priority=9, {needs}")
    fake_site.attention("good")
    said = (
        "distribution: acme-kernels 2.0.3 is installed, needed is acme-kernels >=2.1 (pip install 'eb-fast[kernels]')"
    )
    with pytest.raises(ResolutionError) as caught:
        resolve("attention", "fast", "yaml", requirements, fake_site.loader())
    assert said in str(caught.value)
    assert "installed and fitting: good (eb-good 1.0)" in str(caught.value)
    selection = resolve("attention", "auto", "default", requirements, fake_site.loader())
    assert selection.chosen is not None
    assert selection.chosen.name == "good"
    assert [(r.name, str(r.reasons[0])) for r in selection.rejected] == [("fast", said)]


def test_unknown_name_suggests_c9(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.attention("triton")
    with pytest.raises(PluginNotFoundError, match="Did you mean 'triton'"):
        resolve("attention", "trition", "yaml", requirements, fake_site.loader())


@pytest.mark.parametrize(
    ("kind", "hook", "record", "feature"),
    [
        ("scheduler", "enginebay_schedulers", SCHEDULER.format("x", "False"), "async_scheduling=False"),
        ("executor", "enginebay_executors", EXECUTOR.format("x", 1), "max_concurrent_batches=1"),
    ],
)
def test_what_a_choice_switches_off_is_recorded_c14(
    fake_site: FakeSite, requirements: Requirements, kind: str, hook: str, record: str, feature: str
) -> None:
    fake_site.other(kind, hook, record, "x")
    selection = resolve(kind, "x", "yaml", requirements, fake_site.loader())
    (off,) = switched_off([selection])
    assert off.feature == "asynchronous scheduling"
    assert off.by == f"{kind}:x (eb-{kind}-x 1.0)"
    assert feature in off.why
    already = replace(requirements, async_scheduling=False)
    assert resolve(kind, "x", "yaml", already, fake_site.loader()).switched_off == ()


@pytest.mark.parametrize(
    ("kind", "hook", "record"),
    [
        ("scheduler", "enginebay_schedulers", SCHEDULER.format("x", "True")),
        ("executor", "enginebay_executors", EXECUTOR.format("x", 2)),
    ],
)
def test_nothing_is_switched_off_without_need_c14(
    fake_site: FakeSite, requirements: Requirements, kind: str, hook: str, record: str
) -> None:
    fake_site.other(kind, hook, record, "x")
    assert resolve(kind, "auto", "default", requirements, fake_site.loader()).switched_off == ()


def test_model_is_the_plugin_named_like_the_architecture(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.other("model", "enginebay_models", MODEL.format("LlamaForCausalLM", 1), "LlamaForCausalLM")
    loader = fake_site.loader()
    selection = resolve("model", "auto", "default", requirements, loader)
    assert selection.chosen is not None
    assert selection.chosen.name == "LlamaForCausalLM"
    with pytest.raises(PluginNotFoundError, match=r"architecture 'Gpt2LMHeadModel'(?s:.*)LlamaForCausalLM"):
        resolve("model", "auto", "default", replace(requirements, architecture="Gpt2LMHeadModel"), loader)
    with pytest.raises(ResolutionError, match="names no architecture"):
        resolve("model", "auto", "default", replace(requirements, architecture=""), loader)


def test_model_that_does_not_fit_lists_reasons(fake_site: FakeSite, requirements: Requirements) -> None:
    record = MODEL.format("LlamaForCausalLM", "1, devices=('cuda',)")
    fake_site.other("model", "enginebay_models", record, "LlamaForCausalLM")
    with pytest.raises(ResolutionError, match="device: wanted cpu, allowed cuda"):
        resolve("model", "auto", "default", requirements, fake_site.loader())


def test_plain_weights_leave_the_quant_bay_empty(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.other("quant", "enginebay_quantizers", QUANT.format("gguf", ("gguf",)), "gguf")
    selection = resolve("quant", "auto", "default", requirements, fake_site.loader())
    assert (selection.chosen, selection.identity) == (None, None)
    assert selection.note == "the weights are not quantized"
    assert identities([selection]) == ()
    assert "eb_quant_gguf" not in sys.modules


def test_quant_is_picked_by_the_checkpoint(fake_site: FakeSite, requirements: Requirements) -> None:
    fake_site.other("quant", "enginebay_quantizers", QUANT.format("gguf", ("gguf",)), "gguf")
    fake_site.other("quant", "enginebay_quantizers", QUANT.format("acme", ("acme4",)), "acme")
    loader = fake_site.loader()
    selection = resolve("quant", "auto", "default", replace(requirements, quant_method="acme4"), loader)
    assert selection.chosen is not None
    assert selection.chosen.name == "acme"
    with pytest.raises(ResolutionError, match="quant_method: wanted awq, allowed gguf"):
        resolve("quant", "auto", "default", replace(requirements, quant_method="awq"), loader)
    with pytest.raises(ResolutionError, match="wanted plain weights, allowed gguf"):
        resolve("quant", "gguf", "yaml", requirements, loader)


def test_quant_name_is_checked_against_what_is_installed_c11(fake_site: FakeSite, requirements: Requirements) -> None:
    """No list of allowed names stands before discovery: a new plugin's name is as good as any."""
    fake_site.other("quant", "enginebay_quantizers", QUANT.format("brandnew", ("brandnew",)), "brandnew")
    wanted = replace(requirements, quant_method="brandnew")
    assert resolve("quant", "brandnew", "yaml", wanted, fake_site.loader()).chosen is not None
    with pytest.raises(PluginNotFoundError, match="Did you mean 'brandnew'"):
        resolve("quant", "brandnwe", "yaml", wanted, fake_site.loader())
