"""Headroom: how many tokens everyone seated is left room to grow by before somebody new is let in.

It knows that a preemption for blocks happened; it does not know requests, blocks or policies.

Preempting by recompute costs a request all its work, so a pool under pressure may spend its steps on computing the same
tokens again and again (C23). Each preemption therefore doubles the headroom, and fewer requests are let in; steps without
one halve it again.
"""

from __future__ import annotations

from typing import Final

#: Headroom in calm, in tokens a request.
LEAST: Final = 32
#: Headroom at most: beyond it the pool would stand idle.
MOST: Final = 1024
#: Steps without a preemption that halve the headroom.
CALM_STEPS: Final = 256


class Headroom:
    """A number of tokens that grows with preemptions and shrinks in calm."""

    def __init__(self) -> None:
        self.tokens = LEAST
        self._calm = 0

    def grow(self) -> None:
        """Note a preemption for blocks."""
        self.tokens = min(max(2 * self.tokens, 1), MOST)
        self._calm = 0

    def step(self) -> None:
        """Note a scheduled step."""
        if self.tokens > LEAST:
            self._calm += 1
            if self._calm >= CALM_STEPS:
                self.tokens, self._calm = max(self.tokens // 2, LEAST), 0
