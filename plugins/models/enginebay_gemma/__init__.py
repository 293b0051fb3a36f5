"""Gemma 3's text models. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from enginebay import hookimpl
from enginebay.plugins.records import ModelRecord

if TYPE_CHECKING:
    from enginebay.interfaces.model import CausalLM, ModelContext


def make(context: ModelContext) -> CausalLM:
    """Build the network."""
    from enginebay_gemma.model import Gemma3ForCausalLM

    return Gemma3ForCausalLM(context.config, context.build)


@hookimpl
def enginebay_models() -> Iterable[ModelRecord]:
    """The one architecture."""
    return [ModelRecord(name="Gemma3ForCausalLM", summary="Gemma 3 text models", factory=make, api_version=0)]
