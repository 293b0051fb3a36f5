"""Log-probabilities as users read them: from arrays of positions to dictionaries by token.

It knows arrays and token texts; it does not know requests, or how a log-probability is computed.
"""

from __future__ import annotations

from collections.abc import Callable

from enginebay.engine.outputs import Logprob
from enginebay.interfaces.scheduler import PromptLogprobs, TokenLogprobs

#: the text of a token alone
TokenText = Callable[[int], str]


def by_token(positions: TokenLogprobs, text_of: TokenText | None) -> list[dict[int, Logprob]]:
    """One dictionary a position: the token that stands there first, then the likeliest ones in order."""
    rows = zip(positions.token_ids.tolist(), positions.logprobs.tolist(), positions.ranks.tolist(), strict=True)
    found = []
    for tokens, logprobs, rank in rows:
        entries: dict[int, Logprob] = {}
        # The likeliest ones count up from 1; where the token that stands there is one of them, its own rank stays.
        for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            if token not in entries:
                entries[token] = Logprob(logprob, place or rank, None if text_of is None else text_of(token))
        found.append(entries)
    return found


class PromptScores:
    """The log-probabilities of a prompt's tokens, which come in stretches, and again after a preemption."""

    def __init__(self, text_of: TokenText | None) -> None:
        self._text_of = text_of
        #: the first token has no score
        self._positions: list[dict[int, Logprob] | None] = [None]

    def add(self, stretch: PromptLogprobs) -> None:
        """Take a stretch that begins no later than what is known ends; positions known already stay as they are."""
        known = len(self._positions) - stretch.start
        if known < 0:
            raise RuntimeError(
                f"prompt log-probabilities from {stretch.start} on, but only the first {len(self._positions)} are known"
            )
        scores = stretch.positions
        if known < len(scores):
            new = TokenLogprobs(scores.token_ids[known:], scores.logprobs[known:], scores.ranks[known:])
            self._positions += by_token(new, self._text_of)

    def read(self) -> list[dict[int, Logprob] | None]:
        """All positions so far."""
        return list(self._positions)
