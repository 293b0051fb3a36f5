"""What a user gets back: `RequestOutput` and its parts, with vLLM's field names. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from enginebay.interfaces.scheduler import FinishReason


@dataclass(slots=True)
class Logprob:
    """How likely a token was at its position."""

    #: natural logarithm of the probability; a logit where ``sampler.logprobs_mode`` says so
    logprob: float
    #: 1 is the likeliest token of the whole vocabulary
    rank: int
    #: the token alone as text, U+FFFD where it is a part of a character; None where detokenize is false
    decoded_token: str | None = None


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """When things happened to a request, in seconds of `time.monotonic`; None: it has not happened.

    A token's time is that of the step that gave it, as the front saw it; steps in flight are not dated. Where ``n``
    completions are drawn, the first and the last token of any of them count.
    """

    #: when the call that brought it began
    arrival_time: float
    #: when it (with several completions: the first of them) entered the batch
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    #: when its last completion ended
    finished_time: float | None = None
    #: output tokens of its longest completion
    num_output_tokens: int = 0

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step, the prompt's tokenisation included."""
        return _between(self.arrival_time, self.first_scheduled_time)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return _between(self.arrival_time, self.first_token_time)

    @property
    def mean_inter_token_time(self) -> float | None:
        """Mean seconds between two tokens of a completion; None before the second."""
        span = _between(self.first_token_time, self.last_token_time)
        return None if span is None or self.num_output_tokens < 2 else span / (self.num_output_tokens - 1)


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One completion of a prompt, as far as it has come."""

    #: number of the completion within its request, from 0 to ``n - 1``
    index: int = 0
    #: the whole text so far, up to a stop string or a stop token's text (past it with include_stop_str_in_output);
    #: text that may turn out to be the beginning of a stop string is held back
    text: str
    #: the text that is new since the previous item of a stream; all of it in `LLM.generate`
    delta: str
    #: all ids so far; the last one is the stop token, or the token that completed the stop string, where one ended it
    token_ids: list[int]
    #: one entry a token where ``logprobs`` was asked for: the token itself first, then the likeliest ones
    logprobs: list[dict[int, Logprob]] | None = None
    #: sum over the tokens; None where ``logprobs`` was not asked for
    cumulative_logprob: float | None = None
    #: None while it goes on; else ``"stop"``, ``"length"``, ``"abort"``, or ``"error"`` with `RequestOutput.error`
    finish_reason: FinishReason | None = None
    #: the stop string, or the id out of ``stop_token_ids``, that ended it; None for the end-of-sequence token
    stop_reason: int | str | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """One request's answer, as far as it has come."""

    request_id: str
    #: the prompt's text; None where ids were given
    prompt: str | None
    prompt_token_ids: list[int]
    #: one entry a prompt token where ``prompt_logprobs`` was asked for, as far as they are computed; the first is None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    #: ``n`` completions, by index
    outputs: list[CompletionOutput]
    #: whether all of them have ended
    finished: bool
    #: why the engine gave the request, or one of its completions, up, where it did
    error: str | None = None
    #: prompt tokens that were found in the prefix cache; None before the first token. With several completions it is the
    #: first one's: the others find the first one's blocks
    num_cached_tokens: int | None = None
    metrics: RequestMetrics


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
