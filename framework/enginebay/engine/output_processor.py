"""The output processor: routes what each step produced to its request, and keeps the request's text.

It knows deltas, text streams and outputs; it does not know who reads them. An unfinished request is held by id; a
finished one lives only in the hands of whoever asked for it, so nothing piles up here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from enginebay.engine.detokenizer import Detokenizer, TextStream
from enginebay.engine.outputs import CompletionOutput, RequestOutput
from enginebay.interfaces.scheduler import FinishReason, Request, RequestOutputDelta


class RequestState:
    """What one request has produced, and how much of it was read."""

    def __init__(self, request: Request, prompt: str | None, text: TextStream | None, eos: frozenset[int]) -> None:
        self.request_id = request.request_id
        self.finish_reason: FinishReason | None = None
        self._prompt = prompt
        self._prompt_token_ids: list[int] = request.prompt_token_ids.tolist()
        self._text = text
        self._eos = frozenset() if request.params.ignore_eos else eos
        self._token_ids: list[int] = []
        self._parts: list[str] = []
        self._stop_reason: int | None = None
        self._error: str | None = None
        self._num_parts_read = 0
        #: whether something came since `read`
        self.unread = False

    @property
    def finished(self) -> bool:
        """Whether the request has ended, for whatever reason."""
        return self.finish_reason is not None

    def update(self, delta: RequestOutputDelta) -> None:
        """Take what a step gave. A stop token counts among the ids, but its text is left out."""
        self._token_ids += delta.new_token_ids
        if self._text is not None:
            shown = delta.new_token_ids if delta.stop_token_id is None else delta.new_token_ids[:-1]
            self._append(self._text.push(shown))
        if delta.stop_token_id is not None and delta.stop_token_id not in self._eos:
            self._stop_reason = delta.stop_token_id
        self._error = delta.error
        if delta.finish_reason is not None:
            self.finish(delta.finish_reason)
        elif delta.new_token_ids:
            self.unread = True

    def finish(self, reason: FinishReason) -> None:
        """End the request, and its text with it."""
        self.finish_reason = reason
        if self._text is not None:
            self._append(self._text.flush())
        self.unread = True

    def read(self) -> RequestOutput:
        """Everything so far; ``delta`` is the text since the previous call."""
        delta = "".join(self._parts[self._num_parts_read :])
        text = "".join(self._parts)
        self._parts = [text]
        self._num_parts_read = 1
        self.unread = False
        completion = CompletionOutput(
            text=text,
            delta=delta,
            token_ids=list(self._token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[completion],
            finished=self.finished,
            error=self._error,
        )

    def _append(self, text: str) -> None:
        if text:
            self._parts.append(text)


class OutputProcessor:
    """The states of all unfinished requests.

    Parameters
    ----------
    detokenizer
        None where the model has no tokenizer; then no request may ask for text.
    eos_token_ids
        Ids that end a request without being its ``stop_reason``.
    """

    def __init__(self, detokenizer: Detokenizer | None, eos_token_ids: Iterable[int] = ()) -> None:
        self._detokenizer = detokenizer
        self._eos = frozenset(eos_token_ids)
        self._states: dict[str, RequestState] = {}

    @property
    def unfinished(self) -> list[str]:
        """Ids of the requests that wait or run, in order of arrival."""
        return list(self._states)

    def add(self, request: Request, prompt: str | None) -> RequestState:
        """Follow a request that is about to enter the engine."""
        text = None
        if request.params.detokenize and self._detokenizer is not None:
            text = self._detokenizer.stream(request.prompt_token_ids.tolist(), request.params.skip_special_tokens)
        state = RequestState(request, prompt, text, self._eos)
        self._states[state.request_id] = state
        return state

    def process(self, deltas: Sequence[RequestOutputDelta]) -> None:
        """Route a step's deltas. Those of requests that have ended here (aborted meanwhile) are dropped."""
        for delta in deltas:
            state = self._states.get(delta.request_id)
            if state is None:
                continue
            state.update(delta)
            if state.finished:
                del self._states[delta.request_id]

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End requests with reason ``"abort"``; return the ids that were unfinished."""
        states = [state for i in request_ids if (state := self._states.pop(i, None)) is not None]
        for state in states:
            state.finish("abort")
        return [state.request_id for state in states]
