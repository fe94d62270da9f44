"""Background responses: they are generated whether or not a client waits, and their streams can be read again.

https://platform.openai.com/docs/guides/background. The events of such a response go into a log, in which an event's
``sequence_number`` is its index. A client can resume the stream at any event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from singletree.protocols import responses
from singletree.protocols.answer import EncodedResponse, Frame
from singletree.server.answers.client_link import (
    ON_DISCONNECT,
    EventStream,
    FrameSink,
    OnDisconnect,
    StreamedAnswer,
    WhileConnected,
)
from singletree.server.answers.observer import KeepResponse
from singletree.server.answers.response import Lifecycle
from singletree.server.answers.stream import SendBuffer, Stream
from singletree.server.http.routes import JSON
from singletree.server.http.service import Service
from singletree.server.ids import new_id
from singletree.server.telemetry import Trace, Tracing

_ROUTE = "/v1/responses (background)"


class EventLog(SendBuffer):
    """A send buffer that keeps all events for any number of readers, if it ``is_read``. The producer never waits."""

    __slots__ = ("_ended", "_grown", "_is_read", "_log")

    def __init__(self, *, is_read: bool) -> None:
        super().__init__()
        self._is_read = is_read
        self._log: list[Frame] = []
        self._grown = asyncio.Event()
        self._ended = False

    @property
    def is_full(self) -> bool:
        """Return False: the producer never has to wait for a reader."""
        return False

    def put(self, frames: list[Frame]) -> None:
        if self._is_read:
            self._log += frames
            self._wake()

    def close(self) -> None:
        self._ended = True
        self._wake()

    async def read(self, start: int) -> AsyncIterator[list[Frame]]:
        while True:
            grown = self._grown
            if start < len(self._log):
                frames = self._log[start:]
                start += len(frames)
                yield frames
            elif self._ended:
                return
            else:
                await grown.wait()

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()


class Job:
    """One background response. It has a trace of its own: that of the request ends with the first answer to it."""

    def __init__(self, lifecycle: Lifecycle, tracing: Tracing) -> None:
        choices = replace(lifecycle.choices, keep=partial(self._finish, lifecycle.choices.keep))
        self.id = choices.id
        self.is_streamed = choices.first.request.stream
        self._log = EventLog(is_read=self.is_streamed)
        self._body = responses.encode_in_progress(choices.contexts()[0])
        self.is_over = False
        trace = Trace(tracing, "POST", _ROUTE, new_id("req_"))
        trace.route = _ROUTE
        stream = Stream(choices, trace, buffer=self._log)
        # Opened at once, so that every failure ends the response and not this call.
        stream.open()
        self._cancel: Callable[[], None] | None = stream.cancel
        # Only the task has what the answer is made from, such as its prompt: a job that is over keeps its events.
        self._task = asyncio.create_task(self._run(stream, replace(lifecycle, choices=choices, trace=trace)))

    def body(self) -> bytes:
        return self._body

    def events(self, start: int) -> AsyncIterator[list[Frame]]:
        return self._log.read(start)

    async def cancel(self) -> bytes:
        if not self.is_over and self._cancel is not None:
            self._cancel()
            await asyncio.wait({self._task})
        return self.body()

    def _finish(self, keep: KeepResponse | None, response: EncodedResponse) -> None:
        self._body, self.is_over = response.json, True
        if keep is not None:
            keep(response)

    async def _run(self, stream: Stream, lifecycle: Lifecycle) -> None:
        lifecycle.trace.status = 200
        lifecycle.start()
        try:
            await stream.produce()
        finally:
            lifecycle.end("cancelled")
            lifecycle.trace.close()
            self._cancel = None


class JobStream:
    """The ASGI application that sends the events of a job. The job does not depend on it."""

    def __init__(self, events: AsyncIterator[list[Frame]]) -> None:
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. Raises ClientLeft when the client disconnects."""
        await self.stream_to(EventStream(send), receive, scope.get("extensions", {}).get(ON_DISCONNECT))

    async def stream_to(
        self, sink: FrameSink, receive: Receive, on_disconnect: OnDisconnect | None = None
    ) -> None:
        with WhileConnected(receive, on_disconnect):
            await sink.open(())
            async for frames in self._events:
                await sink.write(frames)
            await sink.write([], is_last=True)


def start_job(service: Service, lifecycle: Lifecycle) -> StreamedAnswer | Response:
    """Begin a response that no connection has to wait for, and return the answer: its events, or the object so far."""
    job = Job(lifecycle, service.tracing)
    service.jobs.add(job)
    return JobStream(job.events(0)) if job.is_streamed else Response(job.body(), media_type=JSON)
