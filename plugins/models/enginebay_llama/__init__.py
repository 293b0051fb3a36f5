"""Llama and the models that share its network (SmolLM2, Llama 2 and 3, TinyLlama). Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from enginebay import hookimpl
from enginebay.plugins.records import ModelRecord

if TYPE_CHECKING:
    from enginebay.interfaces.model import CausalLM, ModelContext


def make(context: ModelContext) -> CausalLM:
    """Build the network."""
    from enginebay_llama.model import LlamaForCausalLM

    return LlamaForCausalLM(context.config, context.build)


@hookimpl
def enginebay_models() -> Iterable[ModelRecord]:
    """The one architecture."""
    return [
        ModelRecord(name="LlamaForCausalLM", summary="Llama 2 and 3, SmolLM2, TinyLlama", factory=make, api_version=0)
    ]
