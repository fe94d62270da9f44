"""Receives an engine's KV events over ZMQ. Needs pyzmq: ``pip install singletree[routing]``."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import zmq
import zmq.asyncio

from singletree.errors import BadConfiguration
from singletree.routing.event_cache import KvEventStream

_LOG = logging.getLogger(__name__)

REPLAY_SECONDS = 10.0
"""How long an engine may take between two repeated messages."""

_AT_ONCE = 64
"""How many messages are taken before other tasks run."""


class EventSubscriber:
    """One engine's events. Receives them while its task runs.

    Args:
        endpoint: where the engine publishes, ``tcp://HOST:PORT`` or ``ipc://PATH``.
        replay: where it repeats messages; empty for nowhere.

    Raises:
        BadConfiguration: an endpoint is malformed.
    """

    def __init__(self, stream: KvEventStream, endpoint: str, replay: str = "") -> None:
        self._stream = stream
        self._context = zmq.asyncio.Context()
        self._receive_from(endpoint, replay)

    def _receive_from(self, endpoint: str, replay: str) -> None:
        self._replay_at = replay
        self._live = self._context.socket(zmq.SUB)
        self._live.set_hwm(0)  # ZMQ would drop messages without a word
        self._live.subscribe(b"")
        self._replay = self._open_replay()
        for socket, at in ((self._live, endpoint), (self._replay, replay)):
            if socket is None:
                continue
            try:
                socket.connect(at)
            except zmq.ZMQError as error:
                self._close_sockets()
                self._context.term()
                raise BadConfiguration(
                    f"--kv-events: {at!r} is not a ZMQ endpoint ({error}); give one such as tcp://10.0.0.1:5557"
                ) from None
        self._task = asyncio.create_task(self._receive())

    def move(self, endpoint: str, replay: str = "") -> None:
        """Receive from other endpoints from now on: the engine runs elsewhere.

        Restart the stream before: the messages of the new process are counted from 0.

        Raises:
            BadConfiguration: an endpoint is malformed. Nothing is received any more.
        """
        self._task.cancel()
        self._close_sockets()
        self._receive_from(endpoint, replay)

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._close_sockets()
        self._context.term()

    def _open_replay(self) -> zmq.asyncio.Socket | None:
        return self._context.socket(zmq.DEALER) if self._replay_at else None

    def _close_sockets(self) -> None:
        for socket in (self._live, self._replay):
            if socket is not None:
                socket.close(0)

    async def _receive(self) -> None:
        stream = self._stream
        while True:
            if stream.replay_from is not None:
                await self._ask_again()
                continue
            stream.feed(await self._live.recv_multipart())
            for _ in range(_AT_ONCE):
                try:
                    stream.feed(await self._live.recv_multipart(zmq.NOBLOCK))
                except zmq.Again:
                    break
            await asyncio.sleep(0)

    async def _ask_again(self) -> None:
        assert self._replay is not None
        start = self._stream.replay_from or 0
        await self._replay.send_multipart([b"", start.to_bytes(8, "big")])
        try:
            while True:
                frames = await asyncio.wait_for(self._replay.recv_multipart(), REPLAY_SECONDS)
                if self._stream.replayed(frames):
                    return
        except TimeoutError:
            _LOG.warning("%s does not repeat KV events; its cache is partly unknown", self._replay_at)
            self._replay.close(0)
            self._replay = self._open_replay()
            assert self._replay is not None
            self._replay.connect(self._replay_at)
            self._stream.replay_failed()
