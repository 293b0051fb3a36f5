"""Recordings: the kernel calls of a step, kept, and run again in one call.

A step of one token runs some three hundred kernels of a few microseconds each; calling them from Python costs more than
some of them take. While a `Recording` records, every kernel call runs and is kept; `replay` runs them again over the same
addresses, whatever stands there now. That is right only if everything that the step computes goes through our kernels, so a
torch operator that is not a view or an uninitialised tensor ends the recording.

It knows calls and addresses; it does not know what they compute.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from enginebay.kernels.cpu.library import library

#: torch operators that only name or reserve memory
HARMLESS = frozenset(
    f"aten::{name}"
    for name in (
        "view", "_unsafe_view", "slice", "select", "transpose", "permute", "unsqueeze", "squeeze", "as_strided", "expand",
        "detach", "alias", "t", "split", "split_with_sizes", "unbind", "empty", "new_empty", "empty_like", "empty_strided",
    )
)  # fmt: skip


class _Active(threading.local):
    """What the present thread records: another one may be running a step of another engine meanwhile."""

    recording: Recording | None = None


#: `ops` looks here in every call
ACTIVE = _Active()


class Recording:
    """Kernel calls in order, and the memory that they use."""

    def __init__(self) -> None:
        #: torch operators that were met and cannot be replayed
        self.foreign: set[str] = set()
        self._calls: list[tuple[int, bytes]] = []
        self._kept: dict[int, Tensor] = {}
        self._functions: Any = None
        self._arguments: Any = None

    @property
    def num_bytes(self) -> int:
        """Memory that the calls write between the first and the last, in bytes."""
        return sum(t.untyped_storage().nbytes() for t in self._kept.values())

    def add(self, function: int, arguments: bytes) -> None:
        """Keep a call: the function's address and its packed arguments."""
        self._calls.append((function, arguments))

    def keep(self, tensor: Tensor) -> None:
        """Hold a tensor that the step made: its address is in the calls."""
        self._kept[tensor.data_ptr()] = tensor

    @contextmanager
    def record(self) -> Iterator[None]:
        """Keep the kernel calls that this thread makes in the block."""
        ACTIVE.recording = self
        try:
            with _Watch(self):
                yield
        finally:
            ACTIVE.recording = None
        self._functions = (ctypes.c_void_p * len(self._calls))(*(function for function, _ in self._calls))
        self._arguments = (ctypes.c_char_p * len(self._calls))(*(arguments for _, arguments in self._calls))

    def replay(self) -> None:
        """Run the calls again."""
        found = library()
        assert found is not None  # something was recorded
        found.eb_replay(self._functions, self._arguments, len(self._calls))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes torch operators beside the kernels, and holds the memory that they reserve."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name not in HARMLESS:
            self._recording.foreign.add(name)
        elif "empty" in name:
            self._recording.keep(out)
        return out
