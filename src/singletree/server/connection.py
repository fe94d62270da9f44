"""A client at the other end of a connection, who may leave at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from singletree.server.body import ClientLeft

T = TypeVar("T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The outcome of ``work``, which is cancelled when the client leaves and has ended when this returns.

    Raises:
        ClientLeft: the client was faster, or ``work`` gave it up and cancelled itself.
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
    """Until the server says that the connection is closed."""
    while (await receive())["type"] != "http.disconnect":
        pass
