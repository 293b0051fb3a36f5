"""Headroom: it doubles with preemptions, and halves in calm."""

from __future__ import annotations

from enginebay.scheduling.headroom import CALM_STEPS, LEAST, MOST, Headroom


def test_it_doubles_with_each_preemption_up_to_its_most() -> None:
    """C23: under pressure fewer requests are let in."""
    headroom = Headroom()
    seen = []
    for _ in range(8):
        headroom.grow()
        seen.append(headroom.tokens)
    assert seen == [min(LEAST * 2**i, MOST) for i in range(1, 9)]


def test_calm_steps_halve_it_down_to_its_least() -> None:
    headroom = Headroom()
    headroom.grow()
    headroom.grow()
    for expected in (2 * LEAST, LEAST, LEAST):
        for _ in range(CALM_STEPS - 1):
            headroom.step()
        assert headroom.tokens >= expected
        headroom.step()
        assert headroom.tokens == expected


def test_a_preemption_starts_the_calm_anew() -> None:
    headroom = Headroom()
    headroom.grow()
    for _ in range(CALM_STEPS - 1):
        headroom.step()
    headroom.grow()
    headroom.step()
    assert headroom.tokens == 4 * LEAST
