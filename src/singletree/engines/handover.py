"""Hands tokens from an engine in this process to their consumer, without a switch of tasks for each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from singletree.engines.engine import Deliver


class Handover:
    """Delivers the tokens of one generation in the call that brings them, while the consumer waits for an output.

    All else goes through the engine's queue, and so do tokens that come while the consumer is busy. After each output
    put there the engine calls ``wake``. From then on nothing is delivered until the consumer waits again, which it
    does when the queue is empty: so the tokens keep their order.

    Attributes:
        deliver: takes the tokens (``GenerationJob.deliver``); None until the consumer has its first ones.
    """

    __slots__ = ("_waiter", "deliver")

    def __init__(self) -> None:
        self.deliver: Deliver | None = None
        self._waiter: asyncio.Future[None] | None = None

    def offer(self, token_ids: Sequence[int]) -> bool:
        """Deliver tokens; return False if they have to go through the queue."""
        if self.deliver is None or self._waiter is None or self._waiter.done():
            return False
        if token_ids and not self.deliver(token_ids):
            self.wake()
        return True

    def wake(self) -> None:
        """Let the consumer look into the queue."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait for ``wake``, or until ``deliver`` takes no more: then the queue is empty."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
