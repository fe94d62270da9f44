"""Tokens that an engine in this process delivers in the call that brings them, and what has to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from singletree.in_process.engine import Handover


def _waiting(deliver: Callable[[Sequence[int]], bool]) -> tuple[Handover, asyncio.Task[None]]:
    handover = Handover()
    handover.deliver = deliver
    return handover, asyncio.create_task(handover.wait())


async def test_nothing_is_delivered_to_a_consumer_that_does_not_wait() -> None:
    got: list[int] = []
    handover = Handover()
    assert not handover.offer([1]), "it has no tokens yet"

    def deliver(token_ids: Sequence[int]) -> bool:
        got.extend(token_ids)
        return True

    handover.deliver = deliver
    assert not handover.offer([1]), "it does not wait"
    waiting = asyncio.create_task(handover.wait())
    await asyncio.sleep(0)
    assert handover.offer([1])
    assert handover.offer([])
    handover.wake()
    assert not handover.offer([2]), "the queue is not empty"
    await waiting
    assert not handover.offer([2])
    assert got == [1]


async def test_a_consumer_that_takes_no_more_is_woken() -> None:
    handover, waiting = _waiting(lambda ids: ids != [2])
    await asyncio.sleep(0)
    assert handover.offer([1])
    assert handover.offer([2])
    assert not handover.offer([3])
    handover.wake()
    await waiting


async def test_a_consumer_that_is_cancelled_gets_nothing() -> None:
    handover, waiting = _waiting(lambda ids: True)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not handover.offer([1])
    handover.wake()
