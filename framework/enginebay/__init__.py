"""enginebay: an LLM inference engine whose every moving part sits in a bay that an installed plugin fills.

Names load on first use, so importing the package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from enginebay.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from enginebay.config import EngineConfig
    from enginebay.engine.llm import LLM
    from enginebay.sampling.params import SamplingParams

__version__ = "0.1.0.dev0"
__all__ = ["LLM", "EngineConfig", "SamplingParams", "__version__", "hookimpl"]

_LAZY = {
    "LLM": "enginebay.engine.llm",
    "EngineConfig": "enginebay.config",
    "SamplingParams": "enginebay.sampling.params",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
