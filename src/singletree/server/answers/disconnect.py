"""Work for a client that may disconnect at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
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
    has_left = False

    async def leave() -> None:
        nonlocal has_left
        with suppress(Exception):
            while (await receive())["type"] != "http.disconnect":
                pass
        has_left = doing.cancel()

    leaving = asyncio.create_task(leave())
    try:
        return await doing
    except BaseException:
        if (has_left or doing.cancelled()) and not _is_cancelled():
            raise ClientLeft from None
        raise
    finally:
        leaving.cancel()


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
