"""One completion as it grows: its tokens, its text with stop strings looked for, its log-probabilities.

It knows deltas and text streams; it does not know its siblings, its prompt, or who reads it.
"""

from __future__ import annotations

from collections.abc import Set

from enginebay.engine.detokenizer import TextStream
from enginebay.engine.logprobs import TokenText, by_token
from enginebay.engine.outputs import CompletionOutput, Logprob
from enginebay.engine.stop_strings import Found, StopStrings
from enginebay.interfaces.scheduler import FinishReason, Request, RequestOutputDelta


class Completion:
    """What one completion has produced, and how much of it was read.

    Parameters
    ----------
    index
        Its number within the request.
    request
        What the engine runs for it.
    text
        None where no text is asked for.
    eos
        Ids that end it without being its ``stop_reason``.
    text_of
        The text of a token alone, for log-probabilities; None without a tokenizer.
    """

    def __init__(
        self, index: int, request: Request, text: TextStream | None, eos: Set[int], text_of: TokenText | None
    ) -> None:
        params = request.params
        self.engine_id = request.request_id
        self.finish_reason: FinishReason | None = None
        self._index = index
        self._text = text
        self._text_of = text_of
        self._eos: Set[int] = frozenset() if params.ignore_eos else eos
        self._keep_stops = params.include_stop_str_in_output
        self._stops = StopStrings(params.stop, include=self._keep_stops) if params.stop else None
        self._min_tokens = params.min_tokens
        self._token_ids: list[int] = []
        self._parts: list[str] = []
        self._num_parts_read = 0
        self._stop_reason: int | str | None = None
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._cumulative = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self._token_ids)

    def update(self, delta: RequestOutputDelta) -> None:
        """Take what a step gave. It may end here, at a stop string, while the engine goes on: look at `finish_reason`."""
        if (
            delta.finish_reason is None and self._stops is None and self._logprobs is None
        ):  # most deltas, so a short way
            self._token_ids += delta.new_token_ids
            if self._text is not None and (text := self._text.push(delta.new_token_ids)):
                self._parts.append(text)
            return
        num_before = len(self._token_ids)
        self._take_tokens(delta)
        if self._logprobs is not None and delta.logprobs is not None:
            # Tokens behind a stop string are dropped, and their log-probabilities with them.
            tokens = self._token_ids[num_before:]
            kept = by_token(delta.logprobs, self._text_of)[: len(tokens)]
            self._logprobs += kept
            self._cumulative += sum(entries[token].logprob for entries, token in zip(kept, tokens, strict=True))
        if self.finish_reason is None and delta.finish_reason is not None:
            if delta.stop_token_id is not None and delta.stop_token_id not in self._eos:
                self._stop_reason = delta.stop_token_id
            self.finish(delta.finish_reason)

    def finish(self, reason: FinishReason) -> None:
        """End the completion, and its text with it; a stop string that ends in what was held back makes it a stop."""
        self.finish_reason = reason
        if self._text is None:
            return
        self._append(self._text.flush())
        if self._stops is not None:
            self._parts.append(self._stops.flush())

    def read(self) -> CompletionOutput:
        """Everything so far; ``delta`` is the text since the previous call."""
        delta = "".join(self._parts[self._num_parts_read :])
        text = "".join(self._parts)
        self._parts = [text]
        self._num_parts_read = 1
        return CompletionOutput(
            index=self._index,
            text=text,
            delta=delta,
            token_ids=list(self._token_ids),
            logprobs=None if self._logprobs is None else list(self._logprobs),
            cumulative_logprob=None if self._logprobs is None else self._cumulative,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )

    def _take_tokens(self, delta: RequestOutputDelta) -> None:
        tokens = delta.new_token_ids
        # The text of a stop token goes the way of a stop string's, as in vLLM.
        hidden = 0 if delta.stop_token_id is None or self._keep_stops else 1
        if self._text is None or self._stops is None:
            self._token_ids += tokens
            if self._text is not None:
                self._append(self._text.push(tokens[: len(tokens) - hidden]))
            return
        for left, token in zip(range(len(tokens) - 1, -1, -1), tokens, strict=True):
            self._token_ids.append(token)
            if left >= hidden:
                self._append(self._text.push([token]))
                if self.finish_reason is not None:
                    return

    def _append(self, text: str) -> None:
        """Add settled text, up to a stop string that ends in it, which ends the completion."""
        if not text:
            return
        if self._stops is None:
            self._parts.append(text)
            return
        shown = self._stops.push(text, may_end=len(self._token_ids) > self._min_tokens)
        if isinstance(shown, Found):
            self._parts.append(shown.text)
            if self.finish_reason not in ("abort", "error"):
                self.finish_reason, self._stop_reason = "stop", shown.stop
        else:
            self._parts.append(shown)
