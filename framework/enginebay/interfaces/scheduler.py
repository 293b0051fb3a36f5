"""The scheduler bay: a `SchedulingPolicy` that steers the built-in mechanics, or a whole `Scheduler`.

Host-side only: numpy arrays, no tensors, no torch. Request state is keyed by *slot*: a small integer that a request holds
from the step that it enters with until it ends or is preempted. A step has *rows*, at most one a request, ordered
decode | extend | prefill: a decode row computes exactly one token of a request whose tokens known at its entry are all
computed; an extend row is a further chunk of one that entered before; the prefill rows are the first chunks of the requests
that enter with this step, in the order of `SchedulerOutput.new_requests`, at position 0 or behind what the prefix cache holds.

Shapes: ``R`` rows of a step, ``N`` new blocks of a step, ``K`` speculative tokens a row (0 so far).
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from enginebay.sampling.params import SamplingParams

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestStatus(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to generate, as the scheduler sees it.

    The fields up to `cache_extras` are the engine's and do not change. `block_keys` is the cache's. The others are kept by the
    scheduler, the built-in one or a plugin's: at any time between its calls they say what has happened. A policy reads them and
    writes none.
    """

    request_id: str
    #: prompt, int32 ``[P]``
    prompt_token_ids: Int32Array
    params: SamplingParams
    #: ids that end the request with reason ``"stop"`` (end-of-sequence ids included unless ignored)
    stop_token_ids: frozenset[int]
    #: most tokens that it may produce: min(max_tokens, max_model_len - P)
    max_output_tokens: int
    #: the sampler's seed, 64 bits; drawn at random where the user gave none
    seed: int
    #: admission order: the engine counts requests up
    arrival: int = 0
    #: smaller is more urgent; a policy that does not look at it refuses any but 0
    priority: int = 0
    #: token ids of ``params.bad_words``: none of these sequences may be completed
    bad_words: tuple[tuple[int, ...], ...] = ()
    #: tagged values that are part of the request's cache keys: equal tokens under other extras share no blocks (C26, C27)
    cache_extras: tuple[tuple[str, str], ...] = ()
    #: SHA-256 keys of the known tokens' full blocks, as far as they were needed; the cache's own note
    block_keys: list[bytes] = field(default_factory=list)
    #: tokens found in the prefix cache when the request was first given a slot; later ones do not count
    num_cached_tokens: int = 0
    #: ``time.monotonic()`` when it was first given a slot; None before
    first_scheduled: float | None = None
    status: RequestStatus = RequestStatus.WAITING
    #: the slot while running, else -1: a preempted request has none, though steps in flight may still name its former one
    slot: int = -1
    #: tokens of retired steps, in order; those in flight are not among them
    output_token_ids: list[int] = field(default_factory=list)
    #: times that it was sent back from running to waiting
    num_preemptions: int = 0
    #: why it ended; None before
    finish_reason: FinishReason | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and known output tokens."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclass(slots=True)
class NewRequest:
    """A request that enters (or re-enters, after preemption) the batch with this step. Fields are its own unless said."""

    request_id: str
    #: below ``max_num_seqs``; nobody runs in it, and no step in flight names it
    slot: int
    #: int32 ``[n]``: the prompt, then any output known before a preemption
    token_ids: Int32Array
    num_prompt_tokens: int
    #: tokens whose KV is in the cache already, less than there are in `token_ids`: `PrefixHit.num_tokens`
    num_computed_tokens: int
    params: SamplingParams
    seed: int
    #: ids that end the request, the end-of-sequence ids included unless ignored
    stop_token_ids: frozenset[int] = frozenset()
    #: token sequences that must not be completed
    bad_words: tuple[tuple[int, ...], ...] = ()


@dataclass(slots=True)
class NewBlocks:
    """Blocks that a cache group gained in this step, flat: entry i says block_table[slots[i], columns[i]] = block_ids[i]."""

    slots: Int32Array  # [N]
    columns: Int32Array  # [N]
    block_ids: Int32Array  # [N]

    def joined(self, *later: NewBlocks) -> NewBlocks:
        """These entries followed by those of `later` allocations of the same group."""
        parts = (self, *later)
        return NewBlocks(
            slots=np.concatenate([p.slots for p in parts]),
            columns=np.concatenate([p.columns for p in parts]),
            block_ids=np.concatenate([p.block_ids for p in parts]),
        )


@dataclass(slots=True)
class SchedulerOutput:
    """What one step computes: differences only, so that it stays small on the wire. At least one row."""

    #: counts up from 0
    step: int
    #: requests of the last rows, in their order
    new_requests: list[NewRequest]
    #: slot of each row, int32 ``[R]``, ordered decode | extend | prefill
    slots: Int32Array
    #: tokens computed for each row in this step, int32 ``[R]``, at least 1
    num_scheduled_tokens: Int32Array
    #: tokens of each row computed by earlier steps (those in flight included), int32 ``[R]``
    num_computed_tokens: Int32Array
    #: leading rows that are decode rows
    num_decode_rows: int
    #: rows that reach the last known token and so yield a new one (the others are unfinished chunks), bool ``[R]``
    samples: BoolArray
    #: index in the request's output, from 0 and across preemptions, of the token that the row yields (the sampler's counter),
    #: int32 ``[R]``; undefined where the row does not sample
    output_index: Int32Array
    #: one entry a cache group: what `KVCacheManager.seat` and `KVCacheManager.allocate` gave for this step
    new_blocks: tuple[NewBlocks, ...]

    @property
    def num_rows(self) -> int:
        """Rows of the step, ``R``."""
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return int(self.num_scheduled_tokens.sum())


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at ``n`` positions: the token that stands there first, then the ``K`` likeliest ones."""

    #: int32 ``[n, 1 + K]``
    token_ids: Int32Array
    #: float32 ``[n, 1 + K]``, natural logarithm (or logits, where ``sampler.logprobs_mode`` says so)
    logprobs: Float32Array
    #: int32 ``[n]``: how many tokens are at least as likely as the one that stands there; 1 is the likeliest
    ranks: Int32Array

    def __len__(self) -> int:
        return len(self.ranks)

    def of(self, position: int, num_top: int) -> TokenLogprobs:
        """One position, cut to `num_top` likeliest tokens."""
        one = slice(position, position + 1)
        return TokenLogprobs(self.token_ids[one, : 1 + num_top], self.logprobs[one, : 1 + num_top], self.ranks[one])


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of a stretch of a prompt."""

    #: index in the prompt of the first token scored; token 0 has none
    start: int
    positions: TokenLogprobs


@dataclass(slots=True)
class ModelOutput:
    """What a step produced, on the host, rows as in its `SchedulerOutput`."""

    #: sampled ids, int32 ``[R, 1 + K]``; undefined where `num_sampled` is smaller; -1: no token was allowed
    token_ids: Int32Array
    #: valid ids a row, int32 ``[R]``; 0 for rows that do not sample
    num_sampled: Int32Array
    #: of the sampled tokens, one position a row, as wide as the widest request of the step asks; None if nobody asks
    logprobs: TokenLogprobs | None = None
    #: by row: prompt tokens that the step scored, for requests that ask
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)


@dataclass(slots=True)
class RequestOutputDelta:
    """What one retired step gave one request, or that it ended by an abort: then no tokens, and reason ``"abort"``."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    #: the token that stopped it, where one did; it is the last of `new_token_ids`
    stop_token_id: int | None = None
    error: str | None = None
    #: one position a new token, cut to what the request asks; None if it asks nothing
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    #: with the request's first token or its end, whichever comes first: `Request.first_scheduled`
    first_scheduled: float | None = None
    #: likewise `Request.num_cached_tokens`
    num_cached_tokens: int | None = None


@dataclass(slots=True, kw_only=True)
class SchedulerStats:
    """Counters for reports and the watchdog."""

    #: unfinished requests without a slot, the preempted ones included
    num_waiting: int = 0
    #: unfinished requests with a slot
    num_running: int = 0
    #: steps that `Scheduler.schedule` gave and `Scheduler.update` has not retired
    num_in_flight_steps: int = 0
    #: as `KVCacheManager` says them
    num_free_blocks: int = 0
    num_blocks: int = 0
    #: since the start
    num_preemptions: int = 0
    #: known tokens of requests that were looked up in the prefix cache, and those found there: `KVCacheManager.prefix_stats`
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Blocks in the cache that hold the first tokens of a request. Valid until the next change of the pool."""

    #: a multiple of the block size, less than the request's known tokens
    num_tokens: int
    #: one entry a cache group: int32 ``[n]``, the blocks of its columns ``first_column .. first_column + n - 1``
    block_ids: tuple[Int32Array, ...]
    #: one entry a cache group: the blocks before are outside of its window
    first_columns: tuple[int, ...]
    #: blocks of the hit that nobody holds: taking them costs the pool that many free ones
    num_idle: int
    #: whether a seated request is computing the block after the hit: waiting for it is cheaper than computing it twice
    pending: bool = False


class KVCacheManager(Protocol):
    """The KV block accounting that a scheduler uses. Implemented by `enginebay.kv_cache`.

    The life of a slot: `find_prefix` and `seat` when a request enters; `allocate` in each step, for the tokens that its rows
    reach; `commit` when that step retires; `free`, once, when the request has ended or was preempted and the last step that
    names the slot has retired.
    """

    @property
    def num_blocks(self) -> int:
        """Usable blocks of the pool (the null block not counted)."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` could hand out now."""

    def blocks_needed(self, slots: Int32Array, num_tokens: Int32Array) -> int:
        """New blocks, over all groups, for the requests in `slots` to reach `num_tokens` tokens each.

        Of a group with a window it counts the most that the request will take at once on its way there.
        """

    def blocks_needed_by_row(self, slots: Int32Array, num_tokens: Int32Array) -> Int32Array:
        """The same for each of `slots`, int32 ``[R]``: who can run when blocks are short."""

    def find_prefix(self, request: Request) -> PrefixHit:
        """The longest cached prefix of the request's known tokens that leaves at least one to compute (C30)."""

    def growth(self, hit: PrefixHit, num_tokens: int) -> int:
        """Free blocks that a request of `num_tokens` tokens would take from the pool, seated on `hit`."""

    def seat(self, slot: int, request: Request, hit: PrefixHit) -> tuple[NewBlocks, ...]:
        """Let the empty `slot` hold the hit's blocks, and remember whose they are."""

    def allocate(
        self, slots: Int32Array, num_tokens: Int32Array, reserve: Int32Array | None = None
    ) -> tuple[NewBlocks, ...] | None:
        """Give each slot the blocks to reach `num_tokens` tokens; None, and no change, if they are short.

        With `reserve`, groups without a window reach that many tokens at once; a group with one takes nothing ahead.
        """

    def commit(self, slots: Int32Array, num_computed: Int32Array) -> None:
        """Say that a step has retired with the first `num_computed` tokens of each slot in the cache.

        Full blocks become findable, and blocks that have left their group's window return to the pool.
        """

    def reset_prefix_cache(self) -> None:
        """Make everything cached so far unfindable, what running requests hold included (C29)."""

    @property
    def prefix_stats(self) -> tuple[int, int]:
        """Tokens looked up by requests at their first seat, and tokens found."""

    def free(self, slot: int) -> None:
        """Return all blocks of `slot` to the pool. Only after the last step naming them has retired."""

    def fits(self, num_tokens: int) -> bool:
        """Whether a single request of `num_tokens` tokens could ever run in an empty pool."""


class SchedulingPolicy(ABC):
    """Pure ordering: who is admitted, who gives way, how much prefill a step takes. It moves nothing itself.

    Every method is a function of its arguments: it changes neither them nor itself, looks at no clock and draws nothing, so
    that equal requests give equal schedules. Of requests that are equal but for their arrival, the earlier must not come
    second.
    """

    #: whether `Request.priority` matters; if not, a request with one is refused rather than ignored
    uses_priority: bool = False

    @abstractmethod
    def admission_key(self, request: Request) -> tuple[float, ...]:
        """Sort key among waiting requests, smallest first: finite numbers, as many for each request; ties go by arrival.

        It is asked once, when the request is added: a preempted request keeps its key.
        """

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Pick which of `running` (never empty, in order of admission) gives its blocks back; default: the last.

        Asked when blocks are short, and then the request with the smallest key is not offered, so that somebody always ends;
        and before `may_preempt`. Another request than those offered is a `PluginError`.
        """
        return running[-1]

    def may_preempt(self, waiting: Request, victim: Request) -> bool:
        """Whether `waiting` is so urgent that `victim` must give way to it; default: never.

        Asked when the first in the queue lacks a seat or blocks, of the chosen victim, and only if its key is the smaller.
        """
        return False

    def prefill_quota(self, num_decode_rows: int, budget: int) -> int:
        """Most prompt tokens in a step, given its decode rows and the tokens left for it; default: all of them.

        What is above `budget` or below 0 is cut; in a step without decode rows at least one prompt token runs.
        """
        return budget


@dataclass(frozen=True, kw_only=True)
class SchedulerContext:
    """What a scheduler's factory is given. A policy's factory gets it too, and may read its options."""

    kv: KVCacheManager
    #: slots: ``0 .. max_num_seqs - 1``
    max_num_seqs: int
    #: most tokens in a step
    max_num_batched_tokens: int
    #: most tokens of a request, prompt and outputs together
    max_model_len: int
    #: when false, a prompt runs in one step; only a preempted request that has outgrown the budget is cut
    chunked_prefill: bool
    #: most prompt tokens in a step that also decodes, beside the policy's own quota; None: as many as fit
    max_prefill_tokens: int | None = None
    #: steps that may be scheduled before the oldest retires
    max_concurrent_batches: int
    #: the policy that the built-in scheduler runs; None in what a plugin's factory is given
    policy: SchedulingPolicy | None
    #: the plugin's own options, an instance of its record's `options` model
    options: BaseModel


class Scheduler(ABC):
    """The whole contract, for those who replace the mechanics.

    Life of a step: `schedule` returns what to compute and moves its requests forward at once; up to
    ``max_concurrent_batches`` steps may be out; `update` retires them, oldest first. A row of a request whose last token is
    still in flight counts on that token (the worker has it on the device); a record that cannot do so says
    ``async_scheduling=False``, and ``max_concurrent_batches`` is then 1.

    Rules: blocks are freed, and tokens committed, only when the step naming them has retired. Whatever was added ends. When
    nothing is unfinished, all blocks are free. Equal calls give equal schedules. `enginebay.conformance.SchedulerConformance`
    holds the rules as laws. All calls come from one thread.
    """

    @abstractmethod
    def add(self, request: Request) -> None:
        """Queue a request, whose id no unfinished one has.

        Raises
        ------
        RequestTooLargeError
            It could never run: prompt and outputs exceed ``max_model_len``, all of them but the last output exceed the pool
            (``kv.fits``), or the prompt exceeds ``max_num_batched_tokens`` while ``chunked_prefill`` is false. Queued, it would
            block those behind it.
        RequestError
            Something that it asks for would be ignored: a priority, if the scheduler does not look at it. The message names the
            request.
        """

    @abstractmethod
    def schedule(self) -> SchedulerOutput | None:
        """Compose the next step; None if nothing can run before a step in flight retires, or as many are out as may be.

        With no step in flight, None means that nothing is unfinished: the engine stops otherwise, rather than wait for ever.
        """

    @abstractmethod
    def update(self, output: SchedulerOutput, result: ModelOutput) -> list[RequestOutputDelta]:
        """Retire the oldest step in flight and say what each request gained; at most one delta a request.

        A sampled token is appended to its request's outputs, and ends it if it is one of its stop tokens (reason ``"stop"``;
        the token is kept), its last allowed one (``"length"``), or -1: no token could be drawn (``"error"``; nothing is
        appended).
        Tokens of requests that ended while the step was out are dropped; those of preempted ones count.
        """

    @abstractmethod
    def abort(self, request_ids: Iterable[str]) -> list[RequestOutputDelta]:
        """End requests in whatever state they are, one delta each.

        Unknown or finished ids are ignored, repeated ones count once. Steps in flight that name them run to their end, and only
        then their blocks come back.
        """

    @abstractmethod
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs, or a step is in flight."""

    @abstractmethod
    def stats(self) -> SchedulerStats:
        """Counters as of now."""
