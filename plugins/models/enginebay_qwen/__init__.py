"""Qwen2 and Qwen3 dense models. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from enginebay import hookimpl
from enginebay.plugins.records import ModelRecord

if TYPE_CHECKING:
    from enginebay.interfaces.model import CausalLM, ModelContext


def make_qwen2(context: ModelContext) -> CausalLM:
    """Build Qwen2's network."""
    from enginebay_qwen.model import Qwen2ForCausalLM

    return Qwen2ForCausalLM(context.config, context.build)


def make_qwen3(context: ModelContext) -> CausalLM:
    """Build Qwen3's network."""
    from enginebay_qwen.model import Qwen3ForCausalLM

    return Qwen3ForCausalLM(context.config, context.build)


@hookimpl
def enginebay_models() -> Iterable[ModelRecord]:
    """The two architectures."""
    return [
        ModelRecord(
            name="Qwen2ForCausalLM", summary="Qwen2 and Qwen2.5 dense models", factory=make_qwen2, api_version=0
        ),
        ModelRecord(name="Qwen3ForCausalLM", summary="Qwen3 dense models", factory=make_qwen3, api_version=0),
    ]
