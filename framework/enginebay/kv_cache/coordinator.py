"""One pool, several cache groups: the `KVCacheManager` that schedulers use.

It knows slots, token counts, and the requests whose blocks can be found again. Nothing here looks at a step in flight: that
a freed block is no longer named by one is the scheduler's law.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from enginebay.interfaces.scheduler import Int32Array, NewBlocks, PrefixHit, Request
from enginebay.kv_cache.block_pool import BlockPool
from enginebay.kv_cache.hashing import BlockHasher
from enginebay.kv_cache.manager import GroupManager
from enginebay.kv_cache.prefix import cached_blocks

#: Tag in `Request.cache_extras` of requests that share blocks with their siblings even when prefix caching is off.
FAMILY_TAG: Final = "family"
_NEVER: Final = 2**31 - 1
_NONE: Final = np.zeros(0, dtype=np.int32)


class KVCacheCoordinator:
    """Block accounting over all cache groups; implements `enginebay.interfaces.scheduler.KVCacheManager`.

    Block ids are unique over groups: each group takes its own blocks from the one pool.

    Parameters
    ----------
    windows
        One entry a cache group: the tokens that a query sees, itself included; None: all before it.
    block_size
        Tokens a block.
    num_blocks
        Blocks of the cache tensors, the null block included: the number given to ``Worker.initialize_kv_cache``.
    max_num_seqs
        Slots.
    max_model_len
        Most tokens a slot.
    prefix_caching
        Find blocks of earlier requests. When false, only siblings (``n > 1``) share blocks.
    max_tokens_in_flight
        Most tokens of a request in all steps that have not retired: a step's token budget times the steps in flight. It
        bounds what a window group holds. None: `max_model_len`.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        max_model_len: int,
        *,
        prefix_caching: bool = True,
        max_tokens_in_flight: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks, len(windows))
        in_flight = max_model_len if max_tokens_in_flight is None else max_tokens_in_flight
        self.managers = tuple(GroupManager(block_size, max_num_seqs, max_model_len, w, in_flight) for w in windows)
        self._window_managers = tuple(m for m in self.managers if m.window is not None)
        self._hasher = BlockHasher(block_size)
        self._nothing = tuple(NewBlocks(_NONE, _NONE, _NONE) for _ in windows)
        self._no_hit = PrefixHit(0, tuple(_NONE for _ in windows), tuple(0 for _ in windows), 0)
        #: request of each seated slot
        self._requests: dict[int, Request] = {}
        #: int32 ``[S]``: computed tokens with which the slot's next block becomes findable
        self._publish_at = np.full(max_num_seqs, _NEVER, dtype=np.int32)
        #: key of the block that each seated request will publish next, as far as its tokens are known; and how many do
        self._next_keys: dict[int, bytes] = {}
        self._pending: Counter[bytes] = Counter()
        self._num_queries = self._num_hits = 0

    # --- counts ------------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Usable blocks of the pool (the null block not counted)."""
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` could hand out now; those that are only cached are among them."""
        return self.pool.num_free

    @property
    def prefix_stats(self) -> tuple[int, int]:
        """Tokens looked up by requests at their first seat, and tokens found."""
        return self._num_queries, self._num_hits

    def blocks_needed_by_row(self, slots: Int32Array, num_tokens: Int32Array) -> Int32Array:
        """New blocks, over all groups, for each of `slots` to reach `num_tokens` tokens, int32 ``[R]``.

        A window group counts what it holds at once on the way there: exact for a step's goal, an upper bound beyond.
        """
        total = np.zeros(len(slots), dtype=np.int32)
        for manager in self.managers:
            total += manager.needed(slots, num_tokens)
        return total

    def blocks_needed(self, slots: Int32Array, num_tokens: Int32Array) -> int:
        """New blocks, over all groups, for the requests in `slots` to reach `num_tokens` tokens each."""
        return int(self.blocks_needed_by_row(slots, num_tokens).sum())

    def fits(self, num_tokens: int) -> bool:
        """Whether a single request of `num_tokens` tokens could ever run in an empty pool."""
        return sum(m.needed_on(num_tokens, 0, 0) for m in self.managers) <= self.pool.num_blocks

    @property
    def longest(self) -> int:
        """The most tokens, up to `max_model_len`, of a request that `fits`."""
        return bisect_right(range(1, self.max_model_len + 1), False, key=lambda n: not self.fits(n))

    # --- prefixes ----------------------------------------------------------------------------------------------------

    def _caches(self, request: Request) -> bool:
        """Whether the request's blocks are published and looked up."""
        return self.prefix_caching or any(tag == FAMILY_TAG for tag, _ in request.cache_extras)

    def find_prefix(self, request: Request) -> PrefixHit:
        """The longest cached prefix of the request's known tokens that leaves at least one to compute (C30).

        A request that wants its prompt's log-probabilities finds nothing: they come of computing it (C28).
        """
        if not self._caches(request) or request.params.prompt_logprobs is not None:
            return self._no_hit
        limit, maps = (request.num_tokens - 1) // self.block_size, self.pool.index.maps
        end = cached_blocks(self._hasher, request, limit, self.managers, maps)
        pending = end < limit and self._hasher.keys(request, end + 1)[end] in self._pending
        if end == 0:
            return replace(self._no_hit, pending=True) if pending else self._no_hit
        num_tokens, keys = end * self.block_size, request.block_keys
        firsts = tuple(m.first_column(num_tokens) for m in self.managers)
        ids = tuple(
            np.array([by_key[key] for key in keys[first:end]], dtype=np.int32)
            for first, by_key in zip(firsts, maps, strict=True)
        )
        return PrefixHit(num_tokens, ids, firsts, sum(map(self.pool.num_idle, ids)), pending)

    def growth(self, hit: PrefixHit, num_tokens: int) -> int:
        """Free blocks that a request of `num_tokens` tokens would take from the pool, seated on `hit`."""
        own = sum(
            manager.needed_on(num_tokens, first, first + len(ids))
            for manager, first, ids in zip(self.managers, hit.first_columns, hit.block_ids, strict=True)
        )
        return own + hit.num_idle

    def seat(self, slot: int, request: Request, hit: PrefixHit) -> tuple[NewBlocks, ...]:
        """Let the empty `slot` hold the hit's blocks, and remember whose they are."""
        if slot in self._requests or any(m.end[slot] for m in self.managers):
            raise RuntimeError(f"KV cache: request {request.request_id} seated in slot {slot}, which is taken")
        self.pool.share(np.concatenate(hit.block_ids))
        self._requests[slot] = request
        if self._caches(request):
            self._publish_at[slot] = hit.num_tokens + self.block_size
            self._announce(slot)
            if request.num_preemptions == 0 and request.params.prompt_logprobs is None:
                self._num_queries += request.num_tokens
                self._num_hits += hit.num_tokens
        return tuple(
            manager.adopt(slot, first, ids)
            for manager, first, ids in zip(self.managers, hit.first_columns, hit.block_ids, strict=True)
        )

    def reset_prefix_cache(self) -> None:
        """Make everything cached so far unfindable, what running requests hold included (C29).

        Who is seated now publishes nothing any more: later blocks of it were computed from old ones.
        """
        self.pool.index.clear()
        self._publish_at[:] = _NEVER
        self._next_keys.clear()
        self._pending.clear()

    # --- blocks ------------------------------------------------------------------------------------------------------

    def allocate(
        self, slots: Int32Array, num_tokens: Int32Array, reserve: Int32Array | None = None
    ) -> tuple[NewBlocks, ...] | None:
        """Give each slot the blocks to reach `num_tokens` tokens; None, and no change, if they are short.

        Full groups reach `reserve` tokens where it is given, for tokens to come. A window group never takes blocks ahead:
        by then others of the slot will have come back. `slots` are distinct.
        """
        ahead = num_tokens if reserve is None else reserve
        counts = [m.missing(slots, ahead if m.window is None else num_tokens) for m in self.managers]
        totals = [int(c.sum()) for c in counts]
        total = sum(totals)
        if total == 0:
            return self._nothing
        if total > self.pool.num_free:
            return None
        parts = np.split(self.pool.allocate(total), np.cumsum(totals)[:-1])
        return tuple(m.extend(slots, c, ids) for m, c, ids in zip(self.managers, counts, parts, strict=True))

    def commit(self, slots: Int32Array, num_computed: Int32Array) -> None:
        """Say that a step has retired with the first `num_computed` tokens of each slot in the cache.

        Full blocks become findable, and blocks that have left their group's window return to the pool. `slots` are
        distinct.
        """
        due = np.flatnonzero(num_computed >= self._publish_at[slots])
        if len(due):
            self._publish(slots[due], num_computed[due])
        for manager in self._window_managers:
            gone = manager.retire(slots, num_computed)
            if len(gone):
                self.pool.free(gone)

    def _publish(self, slots: Int32Array, num_computed: Int32Array) -> None:
        """Make the slots' full blocks of computed, known tokens findable that are not yet."""
        size, requests, keys_of = self.block_size, self._requests, self._hasher.keys
        begins = self._publish_at[slots] // size - 1
        keys: list[bytes] = []
        ends: list[int] = []
        for slot, begin, computed in zip(slots.tolist(), begins.tolist(), num_computed.tolist(), strict=True):
            request = requests[slot]
            end = min(computed, request.num_tokens) // size
            keys += keys_of(request, end)[begin:end]
            ends.append(end)
        counts = np.array(ends, dtype=np.int32) - begins
        for group, manager in enumerate(self.managers):
            self.pool.index.put(group, keys, manager.blocks(slots, begins, counts))
        self._publish_at[slots] = (begins + counts + 1) * size
        for slot in slots.tolist():
            self._announce(slot)

    def _announce(self, slot: int) -> None:
        """Note which block the slot's request will publish next, if its tokens are known: those of a prompt are."""
        self._withdraw(slot)
        end, request = int(self._publish_at[slot]), self._requests[slot]
        if end <= request.num_tokens:
            last = end // self.block_size
            key = self._next_keys[slot] = self._hasher.keys(request, last)[last - 1]
            self._pending[key] += 1

    def _withdraw(self, slot: int) -> None:
        key = self._next_keys.pop(slot, None)
        if key is not None:
            self._pending[key] -= 1
            if not self._pending[key]:
                del self._pending[key]

    def free(self, slot: int) -> None:
        """Return all blocks of `slot` to the pool. Only after the last step naming them has retired."""
        columns, ids = zip(*(m.release(slot) for m in self.managers), strict=True)
        # A prefix is of no use without its beginning, so the tails of all groups are to be reused first.
        order = np.argsort(-np.concatenate(columns), kind="stable")
        self.pool.free(np.concatenate(ids)[order])
        self._requests.pop(slot, None)
        self._publish_at[slot] = _NEVER
        self._withdraw(slot)
