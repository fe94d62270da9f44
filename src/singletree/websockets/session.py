"""Responses over a WebSocket: one connection for a session, and one message for each turn with its new input.

https://developers.openai.com/api/docs/guides/websocket-mode. A message ``response.create`` has the fields of the HTTP
request's body. The events of the stream are sent back, one message for each. The responses of a connection are kept as
long as it is open, stored or not, so ``previous_response_id`` works with ``store: false``. Messages that arrive while a
response is generated wait in a queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from singletree.conversation import Request
from singletree.engines.engine import GenerationJob
from singletree.errors import BodyTooLarge, InvalidRequest, Overloaded, SingletreeError, Unauthorized
from singletree.events import Finished
from singletree.protocols import responses, wire
from singletree.protocols.answer import Frame
from singletree.protocols.limits import check_values
from singletree.protocols.openai.answers import encode_error, error_object
from singletree.server.answers.choices import Choices, DispatchOptions
from singletree.server.answers.client_link import ResponseHeader, StreamedAnswer
from singletree.server.answers.observer import KnownResponses, OpenConnection
from singletree.server.answers.request_body import ArrivingBody, ClientLeft, overloaded
from singletree.server.answers.stream import client_error
from singletree.server.doors import open_door_in_thread
from singletree.server.http.routes import answer_turn, recall_waits
from singletree.server.http.service import WEBSOCKET_PATH as PATH
from singletree.server.http.service import Call, ReadResponse, Service, offload
from singletree.server.ids import new_id
from singletree.server.telemetry import Trace
from singletree.server.turn import pipeline

_MOST_WAITING = 16
"""Most messages in the queue; further ones stay in the network."""
_POLICY_VIOLATION = 1008


class _Message(Struct):
    type: str = ""
    generate: bool | UnsetType = UNSET


def answer_socket(
    service: Service, refused: SingletreeError | None, scope: Scope, receive: Receive, send: Send
) -> Coroutine[Any, Any, None]:
    """Answer on a WebSocket until it closes; one that is ``refused`` is refused before its handshake."""
    if refused is not None:
        return _refuse(refused, scope, receive, send)
    return Socket(service, scope, receive, send).run()


async def _refuse(error: SingletreeError, scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a connection, with ``error`` as an HTTP response where the server supports that."""
    await receive()
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        return
    status, body = encode_error(error, prompt="input")
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "websocket.http.response.start", "status": status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})


class Socket:
    """One WebSocket connection, as ASGI defines it."""

    def __init__(self, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        self._whole = self._service = service
        self._headers = {name.lower(): value for name, value in Headers(scope=scope).items()}
        # The rest of the server expects an HTTP request: a POST to this path.
        self._scope = {**scope, "type": "http", "method": "POST"}
        self._receive, self._send = receive, send
        self._recent: KnownResponses
        self._messages: asyncio.Queue[ArrivingBody | None] = asyncio.Queue(_MOST_WAITING)
        self._closed = asyncio.Event()

    async def run(self) -> None:
        await self._receive()
        try:
            self._service = self._call(self._trace()).service
            connection: OpenConnection = await open_door_in_thread("responses of a connection")
            store = self._service.store
            self._recent = connection(None if store is None else await store.opened())
        except SingletreeError as refused:
            # Clients do not show the text of a refusal before the handshake, so the error is sent after it.
            await self._send({"type": "websocket.accept"})
            await self._fail(refused)
            await self._send({"type": "websocket.close", "code": _POLICY_VIOLATION})
            return
        await self._send({"type": "websocket.accept"})
        listening = asyncio.create_task(self._listen())
        try:
            while (message := await self._messages.get()) is not None:
                await self._answer(message)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            while not self._messages.empty():
                if (left := self._messages.get_nowait()) is not None:
                    self._service.admission.remove(left)

    async def _listen(self) -> None:
        while await self._take():
            pass
        self._closed.set()
        await self._messages.put(None)

    async def _take(self) -> bool:
        """Put the next message into the queue. Return false at the end of the connection."""
        message = await self._receive()
        if message["type"] != "websocket.receive":
            return False
        text, body = message.get("text"), ArrivingBody()
        try:
            with suppress(Overloaded):  # ``_create`` says so in its turn
                self._service.admission.add(
                    body, message.get("bytes") or b"" if text is None else text.encode()
                )
            del message, text  # The body alone is counted.
            await self._messages.put(body)
        except asyncio.CancelledError:
            self._service.admission.remove(body)
            raise
        return True

    async def _answer(self, message: ArrivingBody) -> None:
        trace = self._trace()
        trace.route, trace.status = f"{PATH} (websocket)", 200
        try:
            response = await self._create(message, trace)
            if response is not None:
                await response.stream_to(self, self._disconnected)
        except ClientLeft:
            pass
        except Exception as error:
            known = client_error(error)
            trace.failed(known)
            trace.status = known.status
            await self._fail(known)
        finally:
            trace.close()

    async def _create(self, message: ArrivingBody, trace: Trace) -> StreamedAnswer | None:
        """Prepare the answer to a message; None if there is nothing to stream. Nothing keeps the message."""
        if message.is_refused:
            raise overloaded()
        [body] = message.pieces
        self._service.admission.remove(message)
        limit = self._service.config.body_limit
        if len(body) > limit:
            raise BodyTooLarge(f"the message is larger than {limit} bytes; send less, or raise --body-limit")
        call = self._call(trace)
        if call.service.owner != self._service.owner:
            raise Unauthorized("the API key belongs to another name now; open a new connection")
        await call.begin_work(len(body))
        try:
            warms_up = await offload(len(body), partial(_warms_up, body))
            read: ReadResponse = await open_door_in_thread("requests of Responses")
            request = replace(await read(call, body, self._recent), stream=True)
            if warms_up:
                await self._warm_up(request, len(body), call)
                return None
            response = await answer_turn(call, body, request, self._recent)
        finally:
            call.end_work()
        assert not isinstance(response, Response)  # each request on a WebSocket is streamed
        return response

    async def _warm_up(self, request: Request, size: int, call: Call) -> None:
        """Let the engine prefill the prompt, and keep the input as an empty response."""
        model, request = await self._service.catalog.ready_for(request)
        request = await self._service.media.read(request, model)
        prepare = partial(pipeline.prepare, model, request)
        generation = await offload(size, prepare, waits=recall_waits(model))
        call.end_work()
        keep = self._recent.keeper(request, None)
        [encoder] = Choices(responses, [generation], new_id, keep=keep).encoders(DispatchOptions())
        await self.write(encoder.start())
        one_token = replace(generation.sampling, max_tokens=1)
        job = GenerationJob(
            generation.prompt.token_ids,
            one_token,
            call.trace.request_id,
            pictures=generation.prompt.pictures,
            session=generation.session_name,
            cache_salt=request.cache_salt,
        )
        chunks = model.engine.generate(job)
        async with aclosing(chunks):
            async for _ in chunks:
                break
        await self.write(encoder.end(Finished("stop", generation.usage)))

    def _call(self, trace: Trace) -> Call:
        """Return what answers a message. Its key is checked again: a connection may outlive it."""
        call = Call(self._whole, self._scope, self._receive, self._headers, trace)
        call.authorize("inference")
        return call

    def _trace(self) -> Trace:
        trace = Trace(self._service.tracing, "WS", PATH, new_id("req_"))
        trace.traceparent = self._headers.get("traceparent", "")
        return trace

    async def _disconnected(self) -> Message:
        await self._closed.wait()
        return {"type": "http.disconnect"}

    async def open(self, headers: Iterable[ResponseHeader]) -> None:
        """Begin an answer. There are no headers on a WebSocket."""

    async def write(self, frames: list[Frame], *, is_last: bool = False) -> None:
        """Send frames, one message for each. The connection stays open for the next answer."""
        for _, data in frames:
            await self._send_text(data)

    async def _send_text(self, data: bytes) -> None:
        if self._closed.is_set():
            return
        try:
            await self._send({"type": "websocket.send", "text": data.decode()})
        except OSError:
            raise ClientLeft from None

    async def _fail(self, error: SingletreeError) -> None:
        known = error_object(error, prompt="input")
        await self._send_text(wire.dump({"type": "error", "status": error.status, "error": known}))


def _warms_up(message: bytes) -> bool:
    """Check a message; return whether it only warms up the engine."""
    check_values(message)
    try:
        kind = msgspec.json.decode(message, type=_Message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest(
            "the message is not a JSON object; send an object of type response.create"
        ) from None
    if kind.type != "response.create":
        raise InvalidRequest(
            f"messages of type {kind.type[:64]!r} are not supported; send response.create", param="type"
        )
    return kind.generate is False
