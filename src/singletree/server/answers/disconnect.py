"""Work for a client that may disconnect at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from singletree.server.answers.request_body import ClientLeft

T = TypeVar("T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` and return its result. ``work`` is cancelled when the client disconnects, and has ended on return.

    Args:
        receive: the ASGI channel of the connection.

    Raises:
        ClientLeft: the client disconnected first, or ``work`` cancelled itself.
    """
    doing = asyncio.create_task(work)
    leaving = asyncio.create_task(_leave(receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done() and not doing.cancelled():
            return doing.result()
        raise ClientLeft
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _leave(receive: Receive) -> None:
    """Wait until the connection is closed."""
    while (await receive())["type"] != "http.disconnect":
        pass
