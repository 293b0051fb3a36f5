"""Did-you-mean: the nearest known word to an unknown one. It knows words only, not what they name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``" Did you mean 'torch'?"`` where a known word is near, else an empty string, to end a sentence with."""
    names = list(dict.fromkeys(known))
    by_lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f" Did you mean {by_lower[near[0]]!r}?" if near else ""
