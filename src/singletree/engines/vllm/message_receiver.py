"""Receives the messages of vLLM's engine process, one a step, more cheaply than pyzmq's own socket for asyncio does."""

from __future__ import annotations

import asyncio
from typing import Any

import zmq
import zmq.asyncio

_POLLIN = int(zmq.POLLIN)  # A flag of pyzmq's makes a new object in each operation.


class MessageReceiver:
    """Replaces ``recv_multipart`` of an asyncio socket that nobody has used yet and that one task reads.

    pyzmq keeps a queue of futures and asks for the state of the socket seven times a message: 100 Python calls, more
    than a token costs otherwise. One reader needs one future.

    Args:
        socket: a ``zmq.asyncio.Socket``; its ``recv_multipart`` and ``close`` are replaced.
    """

    def __init__(self, socket: Any) -> None:
        self._socket: Any = zmq.Socket.shadow(socket)
        self._descriptor = socket.FD
        self._close = socket.close
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None
        socket.recv_multipart = self.recv_multipart
        socket.close = self.close

    async def recv_multipart(self, flags: int = 0, copy: bool = True, track: bool = False) -> Any:
        """Return the frames of the next message."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._descriptor, self._wake)
        # The descriptor becomes readable once for all that has come, until the socket is asked for its state.
        while not self._socket.get(zmq.EVENTS) & _POLLIN:
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._socket.recv_multipart(zmq.DONTWAIT, copy=copy, track=track)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        elif not self._socket.closed:
            self._socket.get(zmq.EVENTS)  # Nobody reads: without this the loop would turn without end.

    def close(self, linger: int | None = None) -> None:
        """Close the socket; the task that reads it is cancelled."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
            if self._waiter is not None:
                self._waiter.cancel()
        self._loop = None
        self._close(linger)


def receive_cheaply(engine_core: Any) -> None:
    """Let the client of vLLM's engine process receive by a ``MessageReceiver``, if it is built as vLLM 0.32's is."""
    resources = getattr(engine_core, "resources", None)
    socket = getattr(resources, "output_socket", None)
    if isinstance(socket, zmq.asyncio.Socket) and getattr(resources, "output_queue_task", ...) is None:
        MessageReceiver(socket)
