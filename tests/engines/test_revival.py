"""How soon a dead process is started again."""

from __future__ import annotations

import pytest

from singletree.engines.lifetime import EARLY_DEATH_SECONDS, MAX_PAUSE_SECONDS, RestartBackoff
from singletree.errors import Overloaded


class Clock:
    """Tells what it is set to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def pause(revival: RestartBackoff) -> float:
    """How long the next start has to wait, in seconds."""
    try:
        revival.check()
    except Overloaded as refused:
        return refused.retry_after
    return 0.0


def test_the_first_is_free_and_the_pauses_double() -> None:
    clock = Clock()
    revival = RestartBackoff(clock)
    pauses = []
    for _ in range(10):
        revival.record_start()
        clock.now += 1
        revival.record_death()
        pauses.append(pause(revival))
        clock.now += pauses[-1]
        assert pause(revival) == 0
    assert pauses[:5] == [0, 1, 2, 4, 8]
    assert pauses[-1] == MAX_PAUSE_SECONDS


def test_a_long_life_is_forgiven() -> None:
    clock = Clock()
    revival = RestartBackoff(clock)
    for lived in (1.0, 1.0, EARLY_DEATH_SECONDS, 1.0):
        revival.record_start()
        clock.now += lived
        revival.record_death()
    assert pause(revival) == 0


def test_the_refusal_says_when() -> None:
    clock = Clock()
    revival = RestartBackoff(clock)
    for _ in range(4):
        revival.record_start()
        revival.record_death()
    with pytest.raises(Overloaded, match="died 4 times and will be started again in 4 seconds"):
        revival.check()
