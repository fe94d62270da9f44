"""The answer to a request for one turn: as events while it is generated, or as one body when it is done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import Any

from starlette.types import Receive, Scope, Send

from singletree.errors import Superseded
from singletree.events import Finished, FinishReason
from singletree.server import choices
from singletree.server.body import ClientLeft
from singletree.server.choices import Choices, Whole
from singletree.server.connection import while_connected
from singletree.server.dispatch import Wanted
from singletree.server.identity import new_id
from singletree.server.outbox import Outbox
from singletree.server.pipeline import Generation
from singletree.server.protocol import WireProtocol
from singletree.server.stream import Stream
from singletree.server.takeover import GiveWay
from singletree.server.tracing import Trace

OPENING_SECONDS = 0.25
"""How long a stream waits for the engine's first word, so that a failure by then is still an HTTP status."""

Header = tuple[bytes, bytes]
Hold = Callable[[GiveWay], AbstractContextManager[Any]]

_JSON: Header = (b"content-type", b"application/json")
_EVENT_STREAM: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Answer:
    """An ASGI response. However it ends, the engine is free when it is over.

    Args:
        protocol: the module that encodes it.
        headers: go out beside those of its kind.
        keep_alive_seconds: longest silence in a stream.
        dispatch: side events of a stream.
        keep: takes the end of the answer, its body or last events, before they leave.
        hold: holds the request's place while it is answered.
        tell: further headers, when the answer begins.
        follow: called when the generation is over, however it ended.
    """

    def __init__(
        self,
        protocol: WireProtocol,
        generation: Generation | Choices,
        trace: Trace,
        *,
        headers: Sequence[Header] = (),
        keep_alive_seconds: float = 10.0,
        dispatch: Wanted = Wanted(),  # noqa: B008 (frozen)
        keep: Callable[[bytes], None] | None = None,
        hold: Hold = nullcontext,
        tell: Callable[[], Iterable[Header]] = tuple,
        follow: Callable[[], object] = tuple,
    ) -> None:
        self._protocol = protocol
        self._generation = generation
        self._trace = trace
        self._headers = tuple(headers)
        self._keep_alive_seconds = keep_alive_seconds
        self._dispatch = dispatch
        self._keep = keep
        self._hold = hold
        self._tell = tell
        self._follow = follow
        self._taken_over = False
        self._give_way: GiveWay | None = None
        self._id = new_id(protocol.ID_PREFIX)
        self._created = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises SingletreeError while an error can still be the answer, ClientLeft when nobody wants one."""
        with self._hold(self._make_room):
            await self._answer(receive, send)

    async def _answer(self, receive: Receive, send: Send) -> None:
        generation, trace = self._generation, self._trace
        prompt = generation.prompt
        trace.generating(generation.model.name, prompt.rules, prompt.replayed)
        work = self._stream(send) if generation.request.stream else self._whole(send)
        reason: FinishReason = "error"
        try:
            await while_connected(receive, work)
        except (ClientLeft, Superseded, asyncio.CancelledError):
            reason = "cancelled"
            if self._taken_over:
                raise Superseded from None
            raise
        finally:
            trace.generated(Finished(reason, generation.usage))
            self._follow()

    def _make_room(self) -> None:
        """Another request takes the place of this one."""
        self._taken_over = True
        if self._give_way is not None:
            self._give_way()

    def _working(self, give_way: GiveWay) -> None:
        """From here on ``give_way`` ends the work, at once if it should have ended already."""
        self._give_way = give_way
        if self._taken_over:
            give_way()

    async def _whole(self, send: Send) -> None:
        self._working(_this_task().cancel)
        whole = Whole(self._generation)
        async with aclosing(choices.generate(self._generation, self._trace.request_id)) as batches:
            async for batch in batches:
                if isinstance(batch, Finished):
                    self._trace.generated(batch)
                    await self._send_body(send, whole, batch)
                    return
                if batch:
                    self._trace.first_event()
                for event in batch:
                    whole.feed(event)

    async def _send_body(self, send: Send, whole: Whole, finished: Finished) -> None:
        body = whole.encode(
            self._protocol, finished, id=self._id, created=self._created, new_id=self._trace.new_id
        )
        if self._keep is not None:
            self._keep(body)
        headers = (_JSON, (b"content-length", b"%d" % len(body)), *self._headers, *self._tell())
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        stream = Stream(
            self._protocol,
            self._generation,
            self._trace,
            id=self._id,
            created=self._created,
            dispatch=self._dispatch,
            keep=self._keep,
        )
        self._working(stream.give_way)
        producing = asyncio.create_task(stream.produce())
        beating = asyncio.create_task(stream.beat(self._keep_alive_seconds / 2, _this_task()))
        try:
            await asyncio.wait(
                {producing, stream.opened}, timeout=OPENING_SECONDS, return_when="FIRST_COMPLETED"
            )
            if producing.done() and not stream.opened.done():
                producing.result()
            stream.open()
            headers = (*_EVENT_STREAM, *self._headers, *self._tell())
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await _write(stream.outbox, send)
        finally:
            producing.cancel()
            beating.cancel()
            await asyncio.gather(producing, beating, return_exceptions=True)


async def _write(outbox: Outbox, send: Send) -> None:
    while data := await outbox.take():
        await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _this_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None
    return task
