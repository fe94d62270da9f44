"""A client that closes its side behind its request gets the answer, and one that is gone is told from it."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Receive, Scope, Send

from singletree.server.answers.request_body import ClientLeft

from .test_http_server import GET, POST, Client, Echo, connected, serving, until

SSE = b"text/event-stream; charset=utf-8"
GO_ON = b"HTTP/1.1 100 Continue\r\n\r\n"


class Slow:
    """Answers in two parts, each when it is told to.

    Attributes:
        begins, ends: let it go on.
        left: set when a client has left.
    """

    def __init__(self, content_type: bytes = b"text/plain") -> None:
        self.content_type = content_type
        self.begins, self.ends, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        while (await receive())["more_body"]:
            pass
        answering = asyncio.create_task(self._answer(send))
        leaving = asyncio.ensure_future(receive())
        done, waiting = await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        for each in waiting:
            each.cancel()
        if answering not in done:
            assert leaving.result()["type"] == "http.disconnect"
            self.left.set()
            raise ClientLeft

    async def _answer(self, send: Send) -> None:
        await self.begins.wait()
        headers = [(b"content-type", self.content_type)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: one\n\n", "more_body": True})
        await self.ends.wait()
        await send({"type": "http.response.body", "body": b"data: two\n\n"})


def chunks(body: bytes) -> bytes:
    """Return what the chunks of a whole body have in them."""
    assert body.endswith(b"0\r\n\r\n")
    return b"".join(body.split(b"\r\n")[1::2])


async def half_closed(client: Client, sent: bytes) -> None:
    client.send(sent)
    client.writer.write_eof()
    await client.writer.drain()


@pytest.mark.parametrize("sent", [GET, b"GET /echo HTTP/1.0\r\n\r\n", POST % 3 + b"abc"])
async def test_an_answer_that_is_ready_comes_whole_and_alone(sent: bytes) -> None:
    async with serving(Echo()) as (_, port), connected(port) as client:
        await half_closed(client, sent)
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert answer.endswith(b"\r\n\r\nabc" if b"abc" in sent else b"\r\n\r\n")
        assert answer.count(b"HTTP/1.1") == 1


async def test_all_requests_that_came_are_answered() -> None:
    async with serving(Echo()) as (_, port), connected(port) as client:
        await half_closed(client, b"".join(POST % 1 + b"%d" % number for number in range(9)) + b"GET /ha")
        answers = await client.rest()
        assert answers.count(b"HTTP/1.1 200 OK\r\n") == 9
        assert answers.endswith(b"\r\n\r\n8")


async def test_an_answer_that_takes_long_comes_whole() -> None:
    app = Slow()
    async with serving(app) as (_, port), connected(port) as client:
        await half_closed(client, POST % 2 + b"{}")
        for _ in range(2):
            assert await client.reader.readuntil(b"\r\n\r\n") == GO_ON
        app.begins.set()
        await asyncio.sleep(0.3)
        app.ends.set()
        head, _, body = (await client.rest()).removeprefix(GO_ON).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"\r\nconnection: close" in head
        assert chunks(body) == b"data: one\n\ndata: two\n\n"
        assert not app.left.is_set()


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_a_stream_that_has_begun_comes_whole(version: bytes) -> None:
    app = Slow(SSE)
    app.begins.set()
    async with serving(app) as (_, port), connected(port) as client:
        client.send((POST % 2 + b"{}").replace(b"HTTP/1.1", b"HTTP/" + version))
        head = await client.reader.readuntil(b"\r\n\r\n")
        client.writer.write_eof()
        await asyncio.sleep(0.3)
        app.ends.set()
        body = await client.rest()
        text = chunks(body) if b"chunked" in head else body
        assert text.startswith(b"data: one\n\n:\n\n:\n\n")
        assert text.replace(b":\n\n", b"") == b"data: one\n\ndata: two\n\n"


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_a_client_that_is_gone_is_noticed_whatever_it_waits_for(
    version: bytes, has_begun: bool
) -> None:
    app = Slow(SSE)
    async with serving(app) as (server, port):
        async with connected(port) as client:
            client.send((POST % 2 + b"{}").replace(b"HTTP/1.1", b"HTTP/" + version))
            if has_begun:
                app.begins.set()
                await client.reader.readuntil(b"data: one")
            else:
                await until(lambda: server.tasks)
                await asyncio.sleep(0.05)
        await asyncio.wait_for(app.left.wait(), 1)
        await until(lambda: not server.connections)


async def test_an_old_client_that_closes_its_side_counts_as_gone_before_its_answer() -> None:
    app = Slow()
    async with serving(app) as (_, port), connected(port) as client:
        await half_closed(client, b"GET / HTTP/1.0\r\n\r\n")
        assert await client.rest() == b""
        assert app.left.is_set()


async def test_half_a_body_is_no_request() -> None:
    echo = Echo()
    async with serving(echo) as (_, port), connected(port) as client:
        await half_closed(client, POST % 10 + b"abc")
        assert await client.rest() == b""
        assert echo.left == 1
