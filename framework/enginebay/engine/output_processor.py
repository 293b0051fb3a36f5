"""The output processor: routes what each step produced to its request.

It knows deltas, text streams and requests' states; it does not know who reads them. An unfinished request is held by id; a
finished one lives only in the hands of whoever asked for it, so nothing piles up here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from enginebay.engine.completion import Completion
from enginebay.engine.detokenizer import Detokenizer, TextStream
from enginebay.engine.request_state import RequestState
from enginebay.interfaces.scheduler import Request, RequestOutputDelta


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
        #: id within the engine -> unfinished completion, and whose it is
        self._routes: dict[str, tuple[RequestState, Completion]] = {}

    @property
    def unfinished(self) -> list[str]:
        """Ids of the requests that wait or run, in order of arrival."""
        return list(self._states)

    def add(self, requests: Sequence[Request], prompt: str | None, arrival_time: float) -> RequestState:
        """Follow a request that is about to enter the engine as `requests`, one a completion; the first has its id."""
        detokenizer = self._detokenizer if requests[0].params.detokenize else None
        text_of = None if detokenizer is None else detokenizer.token_text
        completions = [
            Completion(index, request, _text_stream(request, detokenizer), self._eos, text_of)
            for index, request in enumerate(requests)
        ]
        state = RequestState(requests[0], completions, prompt, arrival_time, text_of)
        self._states[state.request_id] = state
        self._routes |= {completion.engine_id: (state, completion) for completion in completions}
        return state

    def process(self, deltas: Sequence[RequestOutputDelta]) -> list[str]:
        """Route a step's deltas; return the engine's ids of completions that a stop string has ended.

        Deltas of those that have ended here, which the engine does not know yet, are dropped.
        """
        stopped = []
        now = time.monotonic()
        for delta in deltas:
            if delta.request_id not in self._routes:
                continue
            state, completion = self._routes[delta.request_id]
            state.update(completion, delta, now)
            if completion.finish_reason is not None:
                del self._routes[delta.request_id]
                if delta.finish_reason is None:
                    stopped.append(delta.request_id)
                if state.finished:
                    del self._states[state.request_id]
        return stopped

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End requests with reason ``"abort"``; return the engine's ids of what was unfinished."""
        states = [state for i in request_ids if (state := self._states.pop(i, None)) is not None]
        ended = [c.engine_id for state in states for c in state.completions if c.finish_reason is None]
        now = time.monotonic()
        for state in states:
            state.finish("abort", now)
        for engine_id in ended:
            del self._routes[engine_id]
        return ended


def _text_stream(request: Request, detokenizer: Detokenizer | None) -> TextStream | None:
    if detokenizer is None:
        return None
    return detokenizer.stream(request.prompt_token_ids.tolist(), request.params.skip_special_tokens)
