"""The answer to a request for one turn: frames while it is generated, or one body at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send

from singletree.errors import Superseded
from singletree.events import Finished, FinishReason, Fold
from singletree.protocols import sse
from singletree.protocols.answer import Frame
from singletree.server.answers.choices import run_together
from singletree.server.answers.disconnect import ON_DISCONNECT, OnDisconnect, WhileConnected
from singletree.server.answers.frame_sinks import WRITE_NOW, EventStream, FrameSink, ResponseHeader, WriteNow
from singletree.server.answers.lifecycle import Lifecycle
from singletree.server.answers.request_body import ClientLeft
from singletree.server.answers.stream import Stream
from singletree.server.answers.tool_dispatch import DispatchOptions
from singletree.server.sessions.duplicate_requests import Cancel

OPENING_SECONDS = 0.25
"""How long a stream waits for the first token before it sends its status: a failure within this time still becomes an
HTTP error.
"""

_JSON: ResponseHeader = (b"content-type", b"application/json")


class TurnResponse:
    """The ASGI application that answers one request. The engine is free when it returns, however it ends.

    Args:
        lifecycle: the answer, and what else the server does about it.
        keep_alive_seconds: longest silence in a stream.
        dispatch: the side events of a stream.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        *,
        keep_alive_seconds: float = 10.0,
        dispatch: DispatchOptions = DispatchOptions(),  # noqa: B008 (frozen)
    ) -> None:
        self._lifecycle = lifecycle
        self._choices = lifecycle.choices
        self._trace = lifecycle.trace
        self._keep_alive_seconds = keep_alive_seconds
        self._dispatch = dispatch
        self._superseded = False
        self._cancel: Cancel | None = None

    # These two return the coroutine of _follow and do not wait for it: whatever wakes it has to pass through each
    # coroutine that waits.

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        """Send the answer.

        Raises:
            SingletreeError: the request failed before the answer began, so an error can still be the answer.
            ClientLeft: the client disconnected.
        """
        extensions = scope.get("extensions", {})
        on_disconnect = extensions.get(ON_DISCONNECT)
        if self._choices.first.request.stream:
            return self.stream_to(EventStream(send, extensions.get(WRITE_NOW)), receive, on_disconnect)
        return self._follow(partial(self._send_body, send), WhileConnected(receive, on_disconnect))

    def stream_to(
        self, sink: FrameSink, receive: Receive, on_disconnect: OnDisconnect | None = None
    ) -> Coroutine[Any, Any, None]:
        """Send the answer as a stream to ``sink``. Raises the same errors as a call.

        Args:
            receive, on_disconnect: report that the client disconnected, as in ``WhileConnected``.
        """
        return self._follow(partial(self._send_stream, sink), WhileConnected(receive, on_disconnect))

    async def _follow(
        self, send_answer: Callable[[WhileConnected], Coroutine[Any, Any, None]], client: WhileConnected
    ) -> None:
        lifecycle = self._lifecycle
        with lifecycle.guard(self._supersede):
            lifecycle.start()
            reason: FinishReason = "error"
            try:
                with client:
                    await send_answer(client)
            except (ClientLeft, Superseded, asyncio.CancelledError):
                reason = "cancelled"
                if self._superseded:
                    raise Superseded from None
                raise
            except Exception as error:
                # It becomes the answer only after the end has been recorded.
                self._trace.ends_with(error)
                raise
            finally:
                lifecycle.end(reason)
                self._cancel = None  # It refers to what has ended, and that to this response.

    def _supersede(self) -> None:
        """End this request: another one repeats it."""
        self._superseded = True
        if self._lifecycle.inspection is not None:
            self._lifecycle.inspection.supersede()
        if self._cancel is not None:
            self._cancel()

    def _set_cancel(self, cancel: Cancel) -> None:
        """Set the function that ends the work, and call it at once if the request is superseded already."""
        self._cancel = cancel
        if self._superseded:
            cancel()

    async def _send_body(self, send: Send, client: WhileConnected) -> None:
        self._set_cancel(client.leave)
        count = len(self._choices.generations)
        folds, ends = [Fold() for _ in range(count)], [Finished("error")] * count

        async def collect(index: int) -> None:
            async with aclosing(self._choices.batches(index, self._trace.request_id)) as batches:
                async for batch in batches:
                    if isinstance(batch, Finished):
                        ends[index] = batch
                    elif batch:
                        self._trace.first_event()
                        folds[index].feed_all(batch)

        # No part of a body is sent before its end, so each failure counts at once.
        await run_together([collect(index) for index in range(count)], lambda: False)
        self._trace.generated(Finished(ends[0].reason, self._choices.usage))
        body = self._choices.encode(folds, ends)
        await self._choices.stored()
        length = (b"content-length", b"%d" % len(body))
        headers = (_JSON, length, *self._lifecycle.response_headers())
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _send_stream(self, sink: FrameSink, client: WhileConnected) -> None:
        stream = Stream(self._choices, self._trace, dispatch=self._dispatch)
        self._set_cancel(stream.supersede)
        producing = asyncio.create_task(stream.produce())
        opening = asyncio.get_running_loop().call_later(OPENING_SECONDS, stream.begin)
        stream.keep_alive(self._keep_alive_seconds / 2, client.leave)
        buffer = stream.buffer
        try:
            frames = await buffer.take()
            if not stream.is_open:
                producing.result()
            await sink.open(self._lifecycle.response_headers())
            if isinstance(sink, EventStream) and sink.write_now is not None:
                buffer.write_through = partial(self._write_through, sink.write_now)
            while True:
                completed, is_last = self._choices.take_completed_calls(), buffer.is_over
                await sink.write(frames, is_last=is_last)
                if completed:
                    self._record_dispatched(completed)
                if is_last:
                    break
                frames = await buffer.take()
        finally:
            opening.cancel()
            stream.rest()
            buffer.write_through = None  # It refers to this response.
            try:
                if not producing.done():
                    producing.cancel()
                    await asyncio.wait((producing,))
                if not producing.cancelled():
                    producing.exception()  # Read, so that it is not logged.
            finally:
                del producing  # Its error has frames that refer to this task.

    def _write_through(self, write: WriteNow, frames: list[Frame]) -> bool:
        if not write(sse.encode(frames), False):
            return False
        if completed := self._choices.take_completed_calls():
            self._record_dispatched(completed)
        return True

    def _record_dispatched(self, completed: Iterable[float]) -> None:
        for each in completed:
            self._trace.dispatched(each)
