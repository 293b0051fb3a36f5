"""What a user gets back: `RequestOutput` and `CompletionOutput`, with vLLM's field names. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from enginebay.interfaces.scheduler import FinishReason


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One completion of a prompt, as far as it has come."""

    #: number of the completion within its request; always 0, since a request has one
    index: int = 0
    #: the whole text so far; a stop token's text is left out
    text: str
    #: the text that is new since the previous item of a stream; all of it in `LLM.generate`
    delta: str
    #: all ids so far, a stop token included
    token_ids: list[int]
    #: log-probabilities are not computed by this version
    logprobs: None = None
    cumulative_logprob: None = None
    #: None while it goes on; else ``"stop"``, ``"length"``, ``"abort"``, or ``"error"`` with `RequestOutput.error`
    finish_reason: FinishReason | None = None
    #: the id out of ``stop_token_ids`` that ended it; None for the end-of-sequence token
    stop_reason: int | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """One request's answer, as far as it has come."""

    request_id: str
    #: the prompt's text; None where ids were given
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    #: why the engine gave the request up, where it did
    error: str | None = None
