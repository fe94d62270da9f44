"""The answer to a request for one turn: frames while it is generated, or one body at the end; and what is done about it
besides sending it: metrics, session, headers, repetitions.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from singletree.errors import Superseded
from singletree.events import Finished, FinishReason, Fold, Usage
from singletree.owners import owned_id
from singletree.protocols.answer import Frame, encode_sse
from singletree.server.answers.choices import Choices, DispatchOptions, run_together
from singletree.server.answers.client_link import (
    ON_DISCONNECT,
    WRITE_NOW,
    EventStream,
    FrameSink,
    OnDisconnect,
    ResponseHeader,
    WhileConnected,
    WriteNow,
)
from singletree.server.answers.observer import INSPECT_HEADER, AnswerRecord, AnswerRecorder, Foresees
from singletree.server.answers.request_body import ClientLeft
from singletree.server.answers.stream import Stream
from singletree.server.sessions.request_headers import Cancel, InFlight, RequestKey
from singletree.server.sessions.session_report import add_cost, raw_cost, report_headers
from singletree.server.sessions.sessions import Opened, Sessions
from singletree.server.sessions.step import CostSums
from singletree.server.telemetry import Trace


@dataclass(slots=True)
class SessionStep:
    """The place of an answer in its session, and whether its response headers report it."""

    sessions: Sessions
    opened: Opened
    is_reported: bool = False
    is_closed: bool = False
    is_charged: bool = False

    def close(self, choices: Choices) -> None:
        """Record the end of the answer's first generation. Later calls have no effect."""
        if not self.is_closed:
            self.is_closed = True
            inspection = choices.inspection
            inspected = "" if inspection is None else inspection.id
            self.sessions.close(self.opened, choices.first, choices.id, inspected)
            if inspection is not None:
                inspection.settle(choices.first)


@dataclass(slots=True)
class Lifecycle:
    """Follows one answer from its start to its end.

    Attributes:
        headers: response headers that are known from the start.
        in_flight: the requests that may be repeated; None for an answer that a repetition cannot cancel.
        key: identifies the request among them; None for a request that is never treated as a repetition.
        foresight: notes what the session will do next; None where nobody reads it.
        in_usage: whether the usage of the answer has the receipt, with the ``warnings`` of the request.
        costs: the sums that an answer without a session counts for.
    """

    choices: Choices
    trace: Trace
    headers: Sequence[ResponseHeader] = ()
    in_flight: InFlight | None = None
    key: RequestKey | None = None
    session: SessionStep | None = None
    foresight: Foresees | None = None
    records: AnswerRecorder | None = None
    in_usage: bool = False
    warnings: Sequence[str] = ()
    costs: CostSums | None = None

    def guard(self, cancel: Cancel) -> AbstractContextManager[None]:
        """Return a context in which a repetition of the request can cancel this one with ``cancel``."""
        if self.in_flight is None or self.key is None:
            return nullcontext()
        return self.in_flight.guard(self.key, cancel)

    def start(self) -> None:
        first = self.choices.first
        if self.in_usage and self.session is not None and len(self.choices.generations) == 1:
            first.report = partial(self._report, self.session)
        self.trace.generating(first.model.name, first.prompt.rules, first.prompt.replayed)
        if self.choices.inspection is not None:
            self.choices.inspection.start()
        if self.choices.capture is not None:
            self.choices.capture.start(self.choices.id)

    def response_headers(self) -> list[ResponseHeader]:
        headers = [*self.headers]
        if self.session is not None and self.session.is_reported:
            # The headers of a stream are sent before its end.
            if self.trace.usage is not None and not self.choices.first.request.stream:
                self._make_early(self.session, self.trace.usage, self.trace.ended)
            headers += report_headers(self.session.opened.step, self.choices.first.reported_cached_tokens)
        if self.choices.inspection is not None:
            headers.append((INSPECT_HEADER, self.choices.inspection.link.encode()))
        return headers

    def _make_early(self, session: SessionStep, usage: Usage, ended: float) -> None:
        """Make the receipt of an answer that shows it. ``ended`` is when the generation has ended."""
        step, first = session.opened.step, self.choices.first
        if session.is_charged:
            return
        step.cached, step.route = first.reported_cached_tokens(), first.reported_route()
        step.payer = session.sessions.costs.place(step.session, first.request.agent)
        add_cost(session.opened, first, usage, self.trace.asked, ended, session.sessions.costs)

    def charge(self, session: SessionStep) -> None:
        """Add what the turn costs to the sums, once ``session`` is closed. Later calls have no effect."""
        if session.is_charged:
            return
        session.is_charged = True
        choices, trace, step, sums = self.choices, self.trace, session.opened.step, session.sessions.costs
        cost = step.cost
        if cost is None:
            usage, ended = trace.usage or choices.usage, trace.ended or time.perf_counter()
            cost = add_cost(session.opened, choices.first, usage, trace.asked, ended, sums)
        sums.charge(*step.payer, cost)

    def _report(self, session: SessionStep, usage: Usage) -> Mapping[str, Any]:
        self._make_early(session, usage, time.perf_counter())
        warnings = {"warnings": self.warnings} if self.warnings else {}
        return {"singletree": {**(session.opened.step.encode_receipt() or {}), **warnings}}

    def end(self, reason: FinishReason) -> None:
        """Record the end of the answer. ``reason`` counts if the generation did not end itself."""
        if not self.trace.is_generated:
            self.trace.generated(Finished(reason, self.choices.usage))
        for each in self.choices.generations:
            if each.route is not None:
                self.trace.routed(each.route, each.cached_tokens)
        if self.choices.capture is not None:
            self.choices.capture.close(reason)
        if self.session is not None:
            self._end_step(self.session, self.choices.first.ended or reason)
        elif self.costs is not None:
            trace, choices = self.trace, self.choices
            self.costs.charge("", "", raw_cost(choices.first, choices.usage, trace.asked, trace.ended))

    def _end_step(self, session: SessionStep, reason: FinishReason) -> None:
        choices, trace, step = self.choices, self.trace, session.opened.step
        step.first_seconds, step.seconds, step.ended = trace.first_seconds, trace.seconds, reason
        # This may change the number of the conversation, which the record has.
        session.close(choices)
        self.charge(session)
        if self.foresight is not None:
            self.foresight.end(step, choices.first, reason)
        if self.records is not None or choices.inspection is not None:
            finished = Finished(reason, choices.usage)
            record = AnswerRecord(choices.id, trace, choices.generations, step, finished)
            if self.records is not None:
                self.records.add(record)
            if choices.inspection is not None:
                choices.inspection.close(record)


OPENING_SECONDS = 0.25
"""How long a stream waits for the first token before it sends its status: a failure by then is an HTTP error."""

_JSON: ResponseHeader = (b"content-type", b"application/json")


class TurnResponse:
    """The ASGI application that answers one request. The engine is free when it returns, however it ends."""

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
        self._superseded = True
        if self._choices.inspection is not None:
            self._choices.inspection.supersede()
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
        await self._choices.stored(*enumerate(ends))
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
                for each in completed:
                    self._trace.dispatched(each)
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
        if not write(encode_sse(frames), False):
            return False
        for each in self._choices.take_completed_calls():
            self._trace.dispatched(each)
        return True


_FINISHED_JOBS = 64
"""How many finished jobs keep their events, so that they can be streamed again; all responses are in the store."""


class BackgroundJob(Protocol):
    """One background response (``stored_responses``)."""

    id: str
    is_streamed: bool
    is_over: bool

    def body(self) -> bytes:
        """Return the response object, as it is now."""

    def events(self, start: int) -> AsyncIterator[list[Frame]]:
        """Yield the events from number ``start`` on, until the last."""

    async def cancel(self) -> bytes:
        """Cancel the response if it is not over, and return the response object."""


class Jobs:
    """The running background responses, and the most recent finished ones."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, BackgroundJob] = OrderedDict()
        self._owner = ""

    def of(self, owner: str) -> Jobs:
        if not owner:
            return self
        part = copy.copy(self)
        part._owner = owner
        return part

    def add(self, job: BackgroundJob) -> None:
        """Add a job, and drop the oldest finished ones."""
        over = [id for id, known in self._jobs.items() if known.is_over]
        for id in over[: max(0, len(over) - _FINISHED_JOBS + 1)]:
            del self._jobs[id]
        self._jobs[owned_id(self._owner, job.id)] = job

    def get(self, id: str) -> BackgroundJob | None:
        return self._jobs.get(owned_id(self._owner, id))

    def drop(self, id: str) -> None:
        if (job := self.get(id)) is not None and job.is_over:
            del self._jobs[owned_id(self._owner, id)]

    async def close(self) -> None:
        await asyncio.gather(*(job.cancel() for job in self._jobs.values()))
