"""How soon a dead process is started again."""

from __future__ import annotations

import pytest

from singletree.engines.revival import LONGEST_PAUSE_SECONDS, SOON_SECONDS, Revival
from singletree.errors import Overloaded


class Clock:
    """Tells what it is set to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def pause(revival: Revival) -> float:
    """How long the next start has to wait, in seconds."""
    try:
        revival.check()
    except Overloaded as refused:
        return refused.retry_after
    return 0.0


def test_the_first_is_free_and_the_pauses_double() -> None:
    clock = Clock()
    revival = Revival(clock)
    pauses = []
    for _ in range(10):
        revival.started()
        clock.now += 1
        revival.died()
        pauses.append(pause(revival))
        clock.now += pauses[-1]
        assert pause(revival) == 0
    assert pauses[:5] == [0, 1, 2, 4, 8]
    assert pauses[-1] == LONGEST_PAUSE_SECONDS


def test_a_long_life_is_forgiven() -> None:
    clock = Clock()
    revival = Revival(clock)
    for lived in (1.0, 1.0, SOON_SECONDS, 1.0):
        revival.started()
        clock.now += lived
        revival.died()
    assert pause(revival) == 0


def test_the_refusal_says_when() -> None:
    clock = Clock()
    revival = Revival(clock)
    for _ in range(4):
        revival.started()
        revival.died()
    with pytest.raises(Overloaded, match="died 4 times and is started again in 4 seconds"):
        revival.check()
