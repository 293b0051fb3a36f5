from __future__ import annotations

from enginebay.plugins.suggest import did_you_mean


def test_near_word_is_suggested_whatever_its_case() -> None:
    assert (
        did_you_mean("llamaforcausallm", ["Qwen3ForCausalLM", "LlamaForCausalLM"])
        == " Did you mean 'LlamaForCausalLM'?"
    )


def test_nothing_near_says_nothing() -> None:
    assert did_you_mean("zzz", ["torch", "flashinfer"]) == ""
    assert did_you_mean("torch", []) == ""
