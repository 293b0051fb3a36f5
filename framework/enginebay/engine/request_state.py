"""One request as its user sees it: a prompt, its completions, and when things happened.

It knows deltas and completions; it does not know the engine, or who reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from enginebay.engine.completion import Completion
from enginebay.engine.logprobs import PromptScores, TokenText
from enginebay.engine.outputs import RequestMetrics, RequestOutput
from enginebay.interfaces.scheduler import FinishReason, Request, RequestOutputDelta


class RequestState:
    """What one request has produced, and whether it was read.

    Parameters
    ----------
    request
        What the engine runs for the first completion; its id is the user's.
    completions
        By index; the first one carries what is said of the prompt.
    prompt
        The prompt's text, if it has one.
    arrival_time
        Seconds of `time.monotonic`.
    text_of
        The text of a token alone; None without a tokenizer.
    """

    def __init__(
        self,
        request: Request,
        completions: Sequence[Completion],
        prompt: str | None,
        arrival_time: float,
        text_of: TokenText | None,
    ) -> None:
        self.request_id = request.request_id
        self.completions = completions
        #: whether something came since `read`
        self.unread = False
        self._prompt = prompt
        self._prompt_token_ids: list[int] = request.prompt_token_ids.tolist()
        self._prompt_scores = None if request.params.prompt_logprobs is None else PromptScores(text_of)
        self._num_unfinished = len(completions)
        self._num_cached_tokens: int | None = None
        self._metrics = RequestMetrics(arrival_time=arrival_time)
        self._error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether all completions have ended, for whatever reason."""
        return self._num_unfinished == 0

    def update(self, completion: Completion, delta: RequestOutputDelta, now: float) -> None:
        """Take what a step that retired at `now` gave one of the completions."""
        if delta.first_scheduled is not None and self._metrics.first_scheduled_time is None:
            self._metrics.first_scheduled_time = delta.first_scheduled
        if delta.num_cached_tokens is not None and completion is self.completions[0]:
            self._num_cached_tokens = delta.num_cached_tokens
        if delta.prompt_logprobs is not None and self._prompt_scores is not None:
            self._prompt_scores.add(delta.prompt_logprobs)
        if delta.error is not None and self._error is None:
            self._error = delta.error
        completion.update(delta)
        if delta.new_token_ids:
            metrics = self._metrics
            metrics.last_token_time = now
            if metrics.first_token_time is None:
                metrics.first_token_time = now
            self.unread = True
        if completion.finish_reason is not None:
            self._end_one(now)

    def finish(self, reason: FinishReason, now: float) -> None:
        """End what goes on still."""
        for completion in self.completions:
            if completion.finish_reason is None:
                completion.finish(reason)
                self._end_one(now)

    def read(self) -> RequestOutput:
        """Everything so far; the completions' ``delta`` is the text since the previous call."""
        self.unread = False
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=None if self._prompt_scores is None else self._prompt_scores.read(),
            outputs=[completion.read() for completion in self.completions],
            finished=self.finished,
            error=self._error,
            num_cached_tokens=self._num_cached_tokens,
            metrics=replace(self._metrics, num_output_tokens=max(c.num_tokens for c in self.completions)),
        )

    def _end_one(self, now: float) -> None:
        self._num_unfinished -= 1
        self.unread = True
        if self.finished:
            self._metrics.finished_time = now
