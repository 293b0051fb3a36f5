"""One rank in the engine's own process. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from enginebay import hookimpl
from enginebay.plugins.records import ExecutorRecord

if TYPE_CHECKING:
    from enginebay.interfaces.executor import Executor, ExecutorContext


def make(context: ExecutorContext) -> Executor:
    """Build the executor."""
    from enginebay_uniproc.executor import UniprocExecutor

    return UniprocExecutor(context)


@hookimpl
def enginebay_executors() -> Iterable[ExecutorRecord]:
    """The one executor."""
    return [
        ExecutorRecord(
            name="uniproc",
            summary="one rank in the engine's own process",
            factory=make,
            api_version=0,
            max_world_size=1,
            max_concurrent_batches=2,
        )
    ]
