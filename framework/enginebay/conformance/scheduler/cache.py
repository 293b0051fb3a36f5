"""The KV block accounting that a scheduler is given in the simulation: the engine's own, watched.

What is asked of it is passed on. It notices blocks that are given back twice, and blocks that are given back, or tokens that
are said to be in the cache, before the steps that compute them have retired.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from enginebay.conformance.scheduler.watch import Watch
from enginebay.interfaces.scheduler import Int32Array, NewBlocks, PrefixHit, Request, SchedulerOutput
from enginebay.kv_cache.coordinator import KVCacheCoordinator


class WatchedCache:
    """A `KVCacheManager`.

    Parameters
    ----------
    cache
        The accounting.
    in_flight
        Gives the steps in flight, oldest first.
    """

    def __init__(
        self, cache: KVCacheCoordinator, watch: Watch, in_flight: Callable[[], Sequence[SchedulerOutput]]
    ) -> None:
        self._cache, self._watch, self._in_flight = cache, watch, in_flight
        #: tokens that retired steps have computed of each slot's request, or found in the cache when it was seated
        self.retired: dict[int, int] = {}
        self._seated: set[int] = set()

    if TYPE_CHECKING:  # what the accounting has, this has

        def __getattr__(self, name: str) -> Any: ...

    else:

        def __getattr__(self, name):
            """Everything that is not watched."""
            return getattr(self._cache, name)

    def seat(self, slot: int, request: Request, hit: PrefixHit) -> tuple[NewBlocks, ...]:
        """See `KVCacheManager.seat`."""
        gained = self._cache.seat(slot, request, hit)
        self._seated.add(slot)
        return gained

    def free(self, slot: int) -> None:
        """See `KVCacheManager.free`."""
        self._watch.expect("conservation", slot in self._seated, "slot {} was freed twice", slot)
        self._seated.discard(slot)
        named = ", ".join(str(step.step) for step in self._in_flight() if slot in step.slots)
        self._watch.expect("retirement", not named, "slot {} was freed while in flight: step {} names it", slot, named)
        self._guarded(lambda: self._cache.free(slot), f"free({slot})")

    def commit(self, slots: Int32Array, num_computed: Int32Array) -> None:
        """See `KVCacheManager.commit`."""
        for slot, computed in zip(slots.tolist(), num_computed.tolist(), strict=True):
            self._watch.expect(
                "retirement",
                computed <= self.retired.get(slot, 0),
                "commit said that {} tokens of slot {} are in the cache, but retired steps computed {}",
                computed,
                slot,
                self.retired.get(slot, 0),
            )
        self._guarded(lambda: self._cache.commit(slots, num_computed), "commit")

    def _guarded(self, call: Callable[[], None], what: str) -> None:
        try:
            call()
        except RuntimeError as error:
            self._watch.fail("conservation", "the block accounting refused {}: {}", what, error)
