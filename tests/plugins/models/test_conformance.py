"""The in-tree models pass the suite that every author runs."""

from __future__ import annotations

from enginebay.conformance import ModelConformance


class TestGemma3(ModelConformance):
    plugin = "Gemma3ForCausalLM"


class TestLlama(ModelConformance):
    plugin = "LlamaForCausalLM"


class TestMistral(ModelConformance):
    plugin = "MistralForCausalLM"


class TestQwen2(ModelConformance):
    plugin = "Qwen2ForCausalLM"


class TestQwen3(ModelConformance):
    plugin = "Qwen3ForCausalLM"
