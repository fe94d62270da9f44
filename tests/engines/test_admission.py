"""Who may run, and who waits for whom."""

from __future__ import annotations

import asyncio

import pytest

from singletree.engines.llamacpp.admission import Admission
from singletree.errors import Overloaded


async def test_slots_are_granted_in_order_of_arrival() -> None:
    admission = Admission(slots=1, tokens=100, queue_limit=9)
    first, second, third = (admission.ticket(10, 0) for _ in range(3))
    assert [t.is_granted for t in (first, second, third)] == [True, False, False]
    first.release()
    assert [t.is_granted for t in (second, third)] == [True, False]
    await second.granted()


async def test_lower_priority_goes_first() -> None:
    admission = Admission(slots=1, tokens=100, queue_limit=9)
    running, late, early = admission.ticket(1, 0), admission.ticket(1, 5), admission.ticket(1, -5)
    running.release()
    assert (late.is_granted, early.is_granted) == (False, True)


async def test_room_counts_and_nobody_overtakes() -> None:
    admission = Admission(slots=9, tokens=100, queue_limit=9)
    running, large, small = admission.ticket(60, 0), admission.ticket(50, 0), admission.ticket(10, 0)
    assert (large.is_granted, small.is_granted) == (False, False)
    running.release()
    assert (large.is_granted, small.is_granted) == (True, True)


async def test_who_leaves_the_line_makes_way() -> None:
    admission = Admission(slots=9, tokens=100, queue_limit=9)
    admission.ticket(60, 0)
    large, small = admission.ticket(50, 0), admission.ticket(10, 0)
    large.release()
    assert small.is_granted


async def test_releasing_twice_gives_back_once() -> None:
    admission = Admission(slots=1, tokens=10, queue_limit=9)
    first = admission.ticket(10, 0)
    first.release()
    first.release()
    second, third = admission.ticket(10, 0), admission.ticket(10, 0)
    assert (second.is_granted, third.is_granted) == (True, False)


async def test_a_full_line_refuses() -> None:
    admission = Admission(slots=1, tokens=10, queue_limit=1)
    admission.ticket(1, 0)
    waiting = admission.ticket(1, 0)
    with pytest.raises(Overloaded, match="1 requests are waiting"):
        admission.ticket(1, 0)
    waiting.release()
    admission.ticket(1, 0)


async def test_a_wait_that_is_cancelled_takes_nothing() -> None:
    admission = Admission(slots=1, tokens=10, queue_limit=9)
    first, second = admission.ticket(1, 0), admission.ticket(1, 0)
    waiting = asyncio.create_task(second.granted())
    await asyncio.sleep(0)
    waiting.cancel()
    second.release()
    first.release()
    assert admission.ticket(1, 0).is_granted
