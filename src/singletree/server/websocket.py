"""Responses over a WebSocket: one connection for a session, each turn a message with what is new.

https://developers.openai.com/api/docs/guides/websocket-mode. A message ``response.create`` has the fields of the body
of the HTTP request; the events of its stream come back, a message each. What was said on the connection is remembered
for as long as it lasts, stored or not, so ``previous_response_id`` works with ``store: false``. Messages that come
while a response is made wait for their turn.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.types import Message, Receive, Scope, Send

from singletree.conversation import Request
from singletree.errors import BodyTooLarge, InvalidRequest, SingletreeError
from singletree.events import Finished, Usage
from singletree.server import pipeline, stored
from singletree.server.aside import aside
from singletree.server.body import ClientLeft
from singletree.server.identity import new_id
from singletree.server.operations import Call, Service, answer, read_response
from singletree.server.protocol import RESPONSES
from singletree.server.stored import Recent
from singletree.server.stream import told
from singletree.server.tracing import Trace

PATH = "/v1/responses"

_WAITING = 16
"""How many messages may wait for their turn; more stay in the network."""
_POLICY_VIOLATION = 1008
_GOING_AWAY = 1001


class _Said(Struct):
    type: str = ""
    generate: bool | UnsetType = UNSET


class Socket:
    """One connection."""

    def __init__(self, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        self._service = service
        self._headers = {name.lower(): value for name, value in Headers(scope=scope).items()}
        # What the pipeline wants to know of a request over HTTP: that it is a POST to this path.
        self._scope = {**scope, "type": "http", "method": "POST"}
        self._receive, self._send = receive, send
        self._recent = Recent()
        self._said: asyncio.Queue[bytes | None] = asyncio.Queue(_WAITING)
        self._gone = asyncio.Event()

    async def run(self) -> None:
        """Until the client leaves."""
        await self._receive()
        try:
            self._call(self._trace()).authorize()
        except SingletreeError as refused:
            # A refusal before the handshake has no words that clients show, so it is told behind it.
            await self._send({"type": "websocket.accept"})
            await self._fail(refused)
            await self._send({"type": "websocket.close", "code": _POLICY_VIOLATION})
            return
        await self._send({"type": "websocket.accept"})
        listening = asyncio.create_task(self._listen())
        try:
            while (said := await self._said.get()) is not None:
                await self._answer(said)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def _listen(self) -> None:
        while (message := await self._receive())["type"] == "websocket.receive":
            data = message.get("text")
            await self._said.put(data.encode() if data is not None else message.get("bytes") or b"")
        self._gone.set()
        await self._said.put(None)

    async def _answer(self, said: bytes) -> None:
        trace = self._trace()
        trace.route, trace.status = f"{PATH} (websocket)", 200
        try:
            await self._create(said, trace)
        except ClientLeft:
            pass
        except Exception as error:
            known = told(error)
            trace.failed(known)
            trace.status = known.status
            await self._fail(known)
        finally:
            trace.close()

    async def _create(self, said: bytes, trace: Trace) -> None:
        warms_up, body = _read(said)
        call = self._call(trace)
        limit = self._service.config.body_limit
        if len(body) > limit:
            raise BodyTooLarge(f"the message is larger than {limit} bytes; send less, or raise --body-limit")
        request = await read_response(call, body, self._recent)
        request = replace(request, stream=True)
        if warms_up:
            await self._warm_up(request, len(body), trace)
            return
        made = await answer(call, body, request, self._recent)
        await made(self._scope, self._disconnected, self._send_events)

    async def _warm_up(self, request: Request, size: int, trace: Trace) -> None:
        """Have the engine read the prompt, and remember the input as a response that says nothing."""
        model = self._service.catalog.get(request.model)
        generation = await aside(size, partial(pipeline.prepare, model, request))
        id, created = new_id(RESPONSES.ID_PREFIX), int(time.time())
        usage = Usage(len(generation.prompt.token_ids), 0, 0, 0)
        encoder = RESPONSES.Encoder(request, id=id, created=created, usage=usage, new_id=new_id)
        await self._send_frames(encoder.start())
        one_token = replace(generation.sampling, max_tokens=1)
        chunks = model.engine.generate(generation.prompt.token_ids, one_token, trace.request_id)
        async with aclosing(chunks):
            async for _ in chunks:
                break
        end = encoder.close(Finished("stop", usage))
        keep = stored.keeper(self._service.store, request, new_id, self._recent)
        if keep is not None:
            keep(end)
        await self._send_frames(end)

    def _call(self, trace: Trace) -> Call:
        return Call(self._service, HttpRequest(self._scope), self._headers, trace)

    def _trace(self) -> Trace:
        return Trace(self._service.tracing, "WS", PATH, new_id("req_"))

    async def _disconnected(self) -> Message:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send_events(self, message: Message) -> None:
        """What would be the body of a streamed answer."""
        await self._send_frames(message.get("body", b""))

    async def _send_frames(self, events: bytes) -> None:
        for event in events.split(b"\n\n"):
            _, found, data = event.partition(b"data: ")
            if found:
                await self._tell(data)

    async def _tell(self, data: bytes) -> None:
        if not self._gone.is_set():
            await self._send({"type": "websocket.send", "text": data.decode()})

    async def _fail(self, error: SingletreeError) -> None:
        status, body = RESPONSES.encode_error(error)
        await self._tell(
            msgspec.json.encode({"type": "error", "status": status, **msgspec.json.decode(body)})
        )


def _read(said: bytes) -> tuple[bool, bytes]:
    """Whether a message only warms up, and the body that it is."""
    try:
        kind = msgspec.json.decode(said, type=_Said)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidRequest("the message is no JSON object; send one of type response.create") from None
    if kind.type != "response.create":
        raise InvalidRequest(
            f"messages of type {kind.type[:64]!r} are not known; send response.create", param="type"
        )
    return kind.generate is False, said
