"""An ASGI client in memory: it reads chunks as they come, stops reading, and hangs up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import unquote

from starlette.types import ASGIApp, Message

from protocols import (
    grammar_chat,
    grammar_completions,
    grammar_generate,
    grammar_messages,
    grammar_responses,
    judge_responses,
)
from singletree.checking.streams import Decoder

GRAMMARS = {
    "/v1/messages": grammar_messages.check,
    "/v1/chat/completions": grammar_chat.check,
    "/v1/completions": grammar_completions.Grammar,
    "/v1/responses": grammar_responses.Grammar,
    "/inference/v1/generate": grammar_generate.Grammar,
}
"""What refuses a stream that is none of its protocol: every one that is read whole goes through it."""

PATIENCE_SECONDS = 30.0
"""How long the server may send nothing, and how long it may go on behind its answer."""


class Reply(NamedTuple):
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as a JSON value."""
        return json.loads(self.body)


class Exchange:
    """One request and its answer as it comes."""

    def __init__(self, body: bytes) -> None:
        self.status: int | None = None
        self.started = asyncio.Event()
        self.headers: dict[str, str] = {}
        self._body: bytes | None = body
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._gone = asyncio.Event()
        self._wants = asyncio.Event()
        self._wants.set()

    async def receive(self) -> Message:
        """See ASGI."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """See ASGI."""
        await self._wants.wait()
        if message["type"] == "http.response.start":
            assert self.status is None
            self.status = message["status"]
            self.headers = {n.decode(): v.decode() for n, v in message["headers"]}
            self.started.set()
            return
        if message.get("body"):
            self._chunks.put_nowait(message["body"])
        if not message.get("more_body"):
            self._chunks.put_nowait(None)

    def leave(self) -> None:
        """Hang up."""
        self._gone.set()

    def stop_reading(self) -> None:
        """From now on the server's writes wait."""
        self._wants.clear()

    def read_on(self) -> None:
        """And now they go on."""
        self._wants.set()

    async def read(self) -> bytes | None:
        """The next chunk; None at the end."""
        return await asyncio.wait_for(self._chunks.get(), PATIENCE_SECONDS)

    async def rest(self) -> bytes:
        """All that is still to come."""
        chunks = []
        while (chunk := await self.read()) is not None:
            chunks.append(chunk)
        return b"".join(chunks)


class Client:
    """Talks to an ASGI application; ``headers`` go with every request."""

    def __init__(self, app: ASGIApp, headers: Mapping[str, str] = {}) -> None:
        self.app = app
        self.headers = headers

    @asynccontextmanager
    async def open(
        self, method: str, path: str, body: object = b"", headers: Mapping[str, str] = {}
    ) -> AsyncIterator[tuple[Exchange, asyncio.Task[None]]]:
        """A request on its way, and the task in which the application answers it."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        exchange = Exchange(data)
        task = self.ask(exchange, scope(method, path, {**self.headers, **headers}, data))
        try:
            yield exchange, task
            await asyncio.wait_for(task, PATIENCE_SECONDS)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def ask(self, exchange: Exchange, scope: dict[str, Any]) -> asyncio.Task[None]:
        """The task in which the application answers ``exchange``."""
        return asyncio.create_task(_run(self.app, scope, exchange))

    async def request(
        self, method: str, path: str, body: object = b"", headers: Mapping[str, str] = {}
    ) -> Reply:
        """A request and its whole answer."""
        async with self.open(method, path, body, headers) as (exchange, _):
            content = await exchange.rest()
        assert exchange.status is not None
        streamed = exchange.headers.get("content-type", "").startswith("text/event-stream")
        if streamed and method == "POST":  # a GET may read on from the middle of a stream
            GRAMMARS[path.partition("?")[0]](content)
        reply = Reply(exchange.status, exchange.headers, content)
        if path.startswith("/v1/responses") and not streamed and reply.status == 200:
            _judge(reply.json)
        return reply

    async def get(self, path: str, headers: Mapping[str, str] = {}) -> Reply:
        """GET."""
        return await self.request("GET", path, b"", headers)

    async def post(self, path: str, body: object, headers: Mapping[str, str] = {}) -> Reply:
        """POST."""
        return await self.request("POST", path, body, headers)


def _judge(body: Any) -> None:
    """Refuses a response object that is none of the API's."""
    if isinstance(body, dict) and body.get("object") == "response" and "deleted" not in body:
        wrong = judge_responses.wrong_response(body)
        assert not wrong, "\n".join(wrong)


async def _run(app: ASGIApp, scope: dict[str, Any], exchange: Exchange) -> None:
    await app(scope, exchange.receive, exchange.send)


def scope(method: str, path: str, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    """The ASGI scope of a request."""
    bare, _, query = path.partition("?")
    length = {"content-length": str(len(body))} if body else {}
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(bare),
        "raw_path": bare.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(n.lower().encode(), v.encode()) for n, v in {**length, **headers}.items()],
        "client": ("127.0.0.1", 50000),
        "server": ("127.0.0.1", 8000),
    }


def events(stream: bytes) -> list[tuple[str, Any]]:
    """(event name, data) of a stream of server-sent events; data that is no JSON stays text."""
    found = []
    for event in Decoder().feed(stream):
        found.append((event.event, json.loads(event.data) if event.data.startswith("{") else event.data))
    return found
