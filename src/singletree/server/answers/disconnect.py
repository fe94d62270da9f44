"""Work for a client that may disconnect at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from starlette.types import Receive

from singletree.server.answers.request_body import ClientLeft

ON_DISCONNECT = "singletree.on_disconnect"
"""The extension of ASGI, in a scope's ``extensions``, that reports a disconnected client without a task that waits for
it. It takes the function to call once the client has disconnected (None for none any more), and returns whether the
client is still connected.
"""

OnDisconnect = Callable[[Callable[[], None] | None], bool]


class WhileConnected:
    """A context that ends when the client disconnects: the work in it is cancelled and has ended on exit.

    Args:
        receive: the ASGI channel of the connection.
        on_disconnect: reports what ``receive`` does at less cost (``ON_DISCONNECT``); None where the server cannot.

    Raises:
        ClientLeft: on entry or exit; the client disconnected, or ``leave`` was called.
    """

    __slots__ = ("_earlier_cancels", "_has_left", "_leaving", "_on_disconnect", "_receive", "_task")

    def __init__(self, receive: Receive, on_disconnect: OnDisconnect | None = None) -> None:
        self._receive = receive
        self._on_disconnect = on_disconnect
        self._leaving: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._earlier_cancels = 0
        self._has_left = False

    def __enter__(self) -> Self:
        if self._on_disconnect is None:
            self._leaving = asyncio.create_task(self._wait())
        elif not self._on_disconnect(self.leave):
            raise ClientLeft
        self._task = asyncio.current_task()
        assert self._task is not None
        self._earlier_cancels = self._task.cancelling()
        return self

    def leave(self) -> None:
        """End the work as if the client had disconnected. Later calls have no effect."""
        if self._task is not None and not self._has_left:
            self._has_left = True
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        if self._on_disconnect is not None:
            self._on_disconnect(None)
        elif self._leaving is not None:
            self._leaving.cancel()
        task, self._task = self._task, None
        # A task that somebody else has cancelled as well stays cancelled.
        if (
            self._has_left
            and task is not None
            and task.uncancel() <= self._earlier_cancels
            and error is not None
        ):
            raise ClientLeft from None

    async def _wait(self) -> None:
        with suppress(Exception):
            while (await self._receive())["type"] != "http.disconnect":
                pass
        self.leave()
