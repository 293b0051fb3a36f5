"""Stop strings: found in a text as it grows, wherever tokens cut it, with no more held back than needed.

It knows strings only: no tokens, no request. Each stop string is followed with its table of borders (Knuth, Morris and
Pratt), so the cost is constant a character, whatever the strings are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Found:
    """A stop string that the text has reached."""

    #: text that may be given out now, the stop string included where it is kept
    text: str
    stop: str


class StopStrings:
    """Looks for the stop strings of one text.

    Text is held back as far as it could be the beginning of a stop string: the longest end of the text that is a proper
    beginning of one. The pieces that `push` and `flush` return add up to the text.

    Parameters
    ----------
    stops
        At least one; none is empty.
    include
        Keep the stop string in the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._borders = [_borders(stop) for stop in stops]
        #: by stop string: how many of its characters the text ends with, less than all
        self._matched = [0] * len(stops)
        self._held = ""

    def push(self, text: str, *, may_end: bool) -> str | Found:
        """Take further text; return what may be given out.

        Of the stop strings that end in `text` the one that begins first wins; of several that begin there, the shortest.
        Without `may_end` those that end in `text` are passed over. After a `Found` the text is over.
        """
        if not text:
            return ""
        best: tuple[int, int, str] | None = None
        for i, stop in enumerate(self._stops):
            end = self._advance(i, text, may_end)
            if end is not None:
                candidate = (end - len(stop), len(stop), stop)
                best = candidate if best is None else min(best, candidate)
        window = self._held + text
        if best is not None:
            start, length, stop = best
            self._held = ""
            return Found(window[: start + length if self._include else start], stop)
        cut = len(window) - max(self._matched)
        self._held = window[cut:]
        return window[:cut]

    def flush(self) -> str:
        """End the text: what was held back is no beginning of a stop string after all."""
        held, self._held = self._held, ""
        return held

    def _advance(self, i: int, text: str, may_end: bool) -> int | None:
        """Follow stop string `i` through `text`; return its first end, counted from the start of what is held."""
        stop, borders, matched = self._stops[i], self._borders[i], self._matched[i]
        for position, char in enumerate(text, len(self._held) + 1):
            while matched and stop[matched] != char:
                matched = borders[matched]
            matched += stop[matched] == char
            if matched == len(stop):
                if may_end:
                    return position
                matched = borders[matched]
        self._matched[i] = matched
        return None


def _borders(stop: str) -> list[int]:
    """For each length: how long the longest beginning is that also ends the first so many characters, but not all."""
    borders = [0, 0]
    for char in stop[1:]:
        border = borders[-1]
        while border and stop[border] != char:
            border = borders[border]
        borders.append(border + (stop[border] == char))
    return borders
