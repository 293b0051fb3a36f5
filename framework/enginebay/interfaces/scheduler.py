"""The scheduler bay: a `SchedulingPolicy` that steers the built-in mechanics, or a whole `Scheduler`.

Host-side only: numpy arrays, no tensors, no torch. Request state is keyed by *slot*: a small integer that a request holds
from admission until it ends or is preempted. A step has *rows*, ordered decode | extend | prefill: a decode row computes
exactly one new token of a request whose prompt is done; an extend row continues a request with cached tokens by more than
one; a prefill row starts at position 0.

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
    """One sequence to generate, as the scheduler sees it."""

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
    #: tokens found in the prefix cache when the request was first seated
    num_cached_tokens: int = 0
    #: ``time.monotonic()`` when it was first seated; None before
    first_scheduled: float | None = None
    status: RequestStatus = RequestStatus.WAITING
    #: the slot while running, else -1
    slot: int = -1
    #: tokens produced so far and known on the host
    output_token_ids: list[int] = field(default_factory=list)
    num_preemptions: int = 0
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
    """A request that enters (or, after preemption, re-enters) the batch with this step."""

    request_id: str
    slot: int
    #: int32 ``[n]``: the prompt, then any output known before a preemption
    token_ids: Int32Array
    num_prompt_tokens: int
    #: tokens whose KV is in the cache already
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
    """What one step computes: differences only, so that it stays small on the wire."""

    step: int
    new_requests: list[NewRequest]
    #: slot of each row, int32 ``[R]``, ordered decode | extend | prefill
    slots: Int32Array
    #: tokens computed for each row in this step, int32 ``[R]``, at least 1
    num_scheduled_tokens: Int32Array
    #: tokens of each row computed by earlier steps (those in flight included), int32 ``[R]``
    num_computed_tokens: Int32Array
    #: leading rows that are decode rows
    num_decode_rows: int
    #: rows whose last token yields a new one (the others are unfinished prompt chunks), bool ``[R]``
    samples: BoolArray
    #: index in the request's output of the token that the row yields (the sampler's counter), int32 ``[R]``
    output_index: Int32Array
    #: one entry a cache group
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
    """What one retired step gave one request."""

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

    num_waiting: int = 0
    num_running: int = 0
    num_in_flight_steps: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    num_preemptions: int = 0
    #: known tokens of requests that were looked up in the prefix cache, and those found there
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
    """The KV block accounting that a scheduler uses. Implemented by `enginebay.kv_cache`."""

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
    """Pure ordering: who is admitted, who gives way, how much prefill a step takes. It moves nothing itself."""

    #: whether `Request.priority` matters; if not, a request with one is refused rather than ignored
    uses_priority: bool = False

    @abstractmethod
    def admission_key(self, request: Request) -> tuple[float, ...]:
        """Sort key among waiting requests, smallest first. It must not change while the request waits."""

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Pick which of `running` (never empty, in order of admission) gives its blocks back; default: the last."""
        return running[-1]

    def may_preempt(self, waiting: Request, victim: Request) -> bool:
        """Whether `waiting` is so urgent that `victim` must give way to it; default: never."""
        return False

    def prefill_quota(self, num_decode_rows: int, budget: int) -> int:
        """Most prompt tokens in a step, given its decode rows and the tokens left for it; default: all of them."""
        return budget


@dataclass(frozen=True, kw_only=True)
class SchedulerContext:
    """What a scheduler factory is given. A policy's factory gets it too, and may read its options."""

    kv: KVCacheManager
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    chunked_prefill: bool
    #: most prompt tokens in a step that also decodes, beside the policy's own quota; None: as many as fit
    max_prefill_tokens: int | None = None
    #: steps that may be scheduled before the oldest retires
    max_concurrent_batches: int
    #: the chosen policy, for a scheduler that takes one
    policy: SchedulingPolicy | None
    options: BaseModel


class Scheduler(ABC):
    """The whole contract, for those who replace the mechanics.

    Life of a step: `schedule` returns what to compute and moves its requests forward at once; up to
    ``max_concurrent_batches`` steps may be out; `update` retires them, oldest first. Blocks are freed only when the last
    step naming them has retired.
    """

    @abstractmethod
    def add(self, request: Request) -> None:
        """Queue a request. It fits max_model_len and the pool: admission checked that."""

    @abstractmethod
    def schedule(self) -> SchedulerOutput | None:
        """Compose the next step; None if nothing can run before a step in flight retires."""

    @abstractmethod
    def update(self, output: SchedulerOutput, result: ModelOutput) -> list[RequestOutputDelta]:
        """Retire the oldest step in flight and say what each request gained."""

    @abstractmethod
    def abort(self, request_ids: Iterable[str]) -> list[RequestOutputDelta]:
        """End requests in whatever state they are; unknown or finished ids are ignored."""

    @abstractmethod
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs, or a step is in flight."""

    @abstractmethod
    def stats(self) -> SchedulerStats:
        """Counters as of now."""
