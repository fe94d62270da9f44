"""The event stream of the inspector: what changes in all processes, as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress

from starlette.types import Receive, Scope, Send

from singletree.inspector.turn_documents import InspectedJson
from singletree.inspector.view import WholeView
from singletree.protocols.wire import dump
from singletree.server.answers.client_link import ON_DISCONNECT, WhileConnected
from singletree.server.http.service import Service

SILENCE_SECONDS = 1.0
"""How often a stream looks whether the server shuts down."""
_COMMENT_SECONDS = 10.0
_SUMMARY_SECONDS = 1.0
_MOST_WAITING = 500
"""Most turns that wait for a reader; one that missed more is told to get the lists again."""
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)


class InspectFeed:
    """The ASGI application that sends the events, of one session or of all.

    What happened since the last write is one state for each turn, however long the reader waited.
    """

    def __init__(self, service: Service, session: str | None) -> None:
        self._service = service
        self._view = WholeView(service)
        self._session = session
        self._turns: dict[str, InspectedJson] = {}
        self._gone: dict[str, None] = {}
        self._is_stale = False
        self._filled = asyncio.Event()
        self._summaries: dict[str, tuple[float, InspectedJson]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the client disconnects (ClientLeft) or the server shuts down."""
        with WhileConnected(receive, scope.get("extensions", {}).get(ON_DISCONNECT)):
            await self._send(send)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        others = self._service.others
        streams = [self._view.own.changes(SILENCE_SECONDS)]
        if others is not None:
            streams += [others.inspector_changes(number, SILENCE_SECONDS) for number in others.numbers]
        readers = [asyncio.create_task(self._read(stream)) for stream in streams]
        await asyncio.sleep(0)  # the readers are registered now, so that nothing after the greeting is missed
        try:
            summaries, _ = await self._view.summaries()
            live = [each for each in summaries if each["is_live"] and self._session in (None, each["id"])]
            await self._write(send, "hello", {"now": time.time(), "sessions": live})
            await self._follow(send)
        finally:
            for task in readers:
                task.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
        await send({"type": "http.response.body", "body": b""})

    async def _read(self, stream: AsyncIterator[InspectedJson]) -> None:
        # A process that has died or is started again is left out of this stream.
        with suppress(OSError, EOFError):
            async for changed in stream:
                for turn in changed["turns"]:
                    if self._session in (None, turn["session"]):
                        self._turns[turn["id"]] = turn
                while len(self._turns) > _MOST_WAITING:
                    self._turns.pop(next(iter(self._turns)))
                    self._is_stale = True
                self._gone.update(dict.fromkeys(changed["gone"]))
                if self._turns or self._gone:
                    self._filled.set()

    async def _follow(self, send: Send) -> None:
        quiet_since = time.monotonic()
        while not self._service.shutdown.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(SILENCE_SECONDS):
                    await self._filled.wait()
            self._filled.clear()
            turns, self._turns = self._turns, {}
            gone, self._gone = self._gone, {}
            if self._is_stale:
                self._is_stale = False
                await self._write(send, "stale", {})
            for turn in turns.values():
                summary = await self._summary(turn)
                if summary is not None:
                    await self._write(send, "turn", {"turn": turn, "session": summary})
            if gone:
                await self._write(send, "gone", {"sessions": list(gone)})
                for id in gone:
                    self._summaries.pop(id, None)
            if turns or gone:
                quiet_since = time.monotonic()
            elif time.monotonic() - quiet_since >= _COMMENT_SECONDS:
                quiet_since = time.monotonic()
                await send({"type": "http.response.body", "body": b": \n\n", "more_body": True})

    async def _summary(self, turn: InspectedJson) -> InspectedJson | None:
        """Return the sums of the turn's session. While a turn runs they may be a second old."""
        id, now = turn["session"], time.monotonic()
        at, known = self._summaries.get(id, (0.0, None))
        if known is None or turn["status"] != "running" or now - at >= _SUMMARY_SECONDS:
            known = await self._view.summary(id)
            if known is not None:
                self._summaries[id] = now, known
        return known

    async def _write(self, send: Send, name: str, data: InspectedJson) -> None:
        body = b"event: %b\ndata: %b\n\n" % (name.encode(), dump(data))
        await send({"type": "http.response.body", "body": body, "more_body": True})
