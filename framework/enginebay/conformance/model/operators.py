"""Which torch operators a model runs by itself, beside those that the core's layers and kernels run for it.

Shapes and results are of no interest here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from enginebay.kernels.cpu.recording import HARMLESS

#: modules whose operators are the core's; `enginebay.layers.decoder` and its layer are networks, as a plugin's are
_CORE = (
    "enginebay.kernels.",
    "enginebay.layers.attention",
    "enginebay.layers.embedding",
    "enginebay.layers.linear",
    "enginebay.layers.norm",
    "enginebay.layers.parallel",
    "enginebay.layers.rotary",
    "enginebay.conformance.attention.plain",
)


@contextmanager
def own_operators() -> Iterator[set[str]]:
    """Collect the operators of the block that are neither views nor run by the core, as ``aten::mul (in acme.model)``."""
    found: set[str] = set()
    with _Watch(found):
        yield found


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, found: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if name not in HARMLESS:
            module = _caller(sys._getframe(1))
            if not f"{module}.".startswith(_CORE):
                self._found.add(f"{name} (in {module})")
        return func(*args, **(kwargs or {}))


def _caller(frame: FrameType | None) -> str:
    """The module that called torch."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module != __name__ and module.partition(".")[0] != "torch":
            return module
        frame = frame.f_back
    return ""
