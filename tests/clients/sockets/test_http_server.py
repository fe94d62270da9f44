"""Connections as clients open them, also hostile ones: real sockets on loopback, on both event loops."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from singletree.server.answers.client_link import WRITE_NOW
from singletree.server.answers.request_body import ClientLeft
from singletree.server.http import connection as limits
from singletree.server.http.connection import Connection
from singletree.server.http.exchange import PIECE_BYTES
from singletree.server.http.http_server import HttpServer

POST = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
GET = b"GET /echo HTTP/1.1\r\nhost: localhost\r\n\r\n"


class Client:
    """A client that writes bytes and reads bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        """Write."""
        self.writer.write(data)

    async def rest(self) -> bytes:
        """Everything up to the end of the connection."""
        return await asyncio.wait_for(self.reader.read(), 10)

    async def answer(self) -> tuple[bytes, bytes]:
        """The next head and its body, by content-length."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10)
        length = next(
            (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length")),
            0,
        )
        return head, await asyncio.wait_for(self.reader.readexactly(length), 10)


class Echo:
    """Answers with the body, and keeps what it saw.

    Attributes:
        scopes: of all requests.
        pieces: how many messages each body came in.
        left: how many clients left.
    """

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        self.pieces: list[int] = []
        self.left = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        self.scopes.append(scope)
        body, more, count = bytearray(), True, 0
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left += 1
                return
            body += message["body"]
            more, count = message["more_body"], count + 1
        self.pieces.append(count)
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(body)})


@asynccontextmanager
async def serving(app: ASGIApp, **settings: Any) -> AsyncIterator[tuple[HttpServer, int]]:
    """A server of ``app``, and its port."""
    server = HttpServer(app, **settings)
    port = await server.listen("127.0.0.1", 0)
    try:
        yield server, port
    finally:
        await asyncio.wait_for(server.close(), 10)
        assert not server.connections
        assert not server.tasks


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    """A client."""
    client = Client(*await asyncio.open_connection("127.0.0.1", port, limit=2**26))
    try:
        yield client
    finally:
        client.writer.close()


async def until(condition: Any) -> None:
    """Wait until something is true."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def only(server: HttpServer) -> Connection:
    """The only connection."""
    [connection] = server.connections
    assert isinstance(connection, Connection)
    return connection


async def test_requests_follow_each_other_on_a_connection() -> None:
    echo = Echo()
    async with serving(echo) as (_, port), connected(port) as client:
        for body in (b"one", b"", b"three"):
            client.send(POST % len(body) + body)
            head, came = await client.answer()
            assert came == body
            assert head.startswith(b"HTTP/1.1 200 OK\r\ndate: ")
            assert b"connection" not in head
    assert [each["path"] for each in echo.scopes] == ["/echo"] * 3
    assert echo.pieces == [1, 1, 1]


async def test_a_body_comes_in_one_message_however_it_was_sent() -> None:
    echo = Echo()
    body = bytes(range(256)) * 500
    async with serving(echo) as (_, port), connected(port) as client:
        client.send(POST % len(body))
        for start in range(0, len(body), 10_000):
            client.send(body[start : start + 10_000])
            await client.writer.drain()
            await asyncio.sleep(0)
        assert (await client.answer())[1] == body
        client.send(b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        client.send(b"".join(b"3;x=y\r\n%b\r\n" % body[at : at + 3] for at in range(0, 3000, 3)))
        client.send(b"0\r\ntrailer: t\r\n\r\n")
        assert (await client.answer())[1] == body[:3000]
    assert echo.pieces == [1, 1]
    assert all(name != b"trailer" for name, _ in echo.scopes[1]["headers"])


async def test_a_large_body_is_read_piece_by_piece() -> None:
    echo = Echo()
    body = b"x" * 5_000_000
    async with serving(echo) as (_, port), connected(port) as client:
        client.send(POST % len(body) + body)
        assert len((await client.answer())[1]) == len(body)
    assert 5 < echo.pieces[0] <= 5_000_000 // PIECE_BYTES + 1


async def test_a_body_that_nobody_reads_yet_is_not_read_whole() -> None:
    go_on = asyncio.Event()

    async def late(scope: Scope, receive: Receive, send: Send) -> None:
        await go_on.wait()
        await Echo()(scope, receive, send)

    async with serving(late) as (server, port), connected(port) as client:
        client.send(POST % 40_000_000 + b"x" * 40_000_000)
        await until(lambda: server.connections and only(server)._is_paused)
        await asyncio.sleep(0.05)
        assert len(only(server)._exchanges[0]._body) < 3_000_000
        assert only(server)._deadline == math.inf, "the server is late, not the client"
        go_on.set()
        assert len((await client.answer())[1]) == 40_000_000


async def test_requests_that_are_sent_ahead_are_answered_in_order() -> None:
    async with serving(Echo()) as (_, port), connected(port) as client:
        client.send(b"".join(POST % 3 + b"%03d" % number for number in range(200)))
        for number in range(200):
            assert (await client.answer())[1] == b"%03d" % number


async def test_of_too_many_requests_that_are_sent_ahead_the_first_are_answered() -> None:
    async with serving(Echo()) as (_, port), connected(port) as client:
        client.send(GET * 5000)
        answers = await client.rest()
        assert answers.count(b"HTTP/1.1 200 OK\r\n") == answers.count(b"HTTP/1.1") < 1000
        assert answers.count(b"connection: close") == 1


async def test_a_client_that_waits_for_permission_gets_it_when_the_body_is_wanted() -> None:
    async def choosy(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/no":
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})
        else:
            await Echo()(scope, receive, send)

    ask = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4\r\nexpect: 100-Continue\r\n\r\n"
    async with serving(choosy) as (_, port):
        async with connected(port) as client:
            client.send(ask % b"/yes")
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.send(b"body")
            assert (await client.answer())[1] == b"body"
        async with connected(port) as client:
            client.send(ask % b"/no")
            answer = await client.rest()
            assert answer.startswith(b"HTTP/1.1 401 ")
            assert b"connection: close" in answer


async def test_an_early_answer_reaches_a_client_that_is_still_sending() -> None:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"3")]})
        await send({"type": "http.response.body", "body": b"no!"})

    async with serving(refuse) as (server, port), connected(port) as client:
        client.send(POST % 30_000_000)
        sending = asyncio.create_task(_send_slowly(client, 30_000_000))
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert answer.endswith(b"\r\nconnection: close\r\n\r\nno!")
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await until(lambda: server.connections)
        only(server).check_time(asyncio.get_running_loop().time() + 6)
        await until(lambda: not server.connections)


async def _send_slowly(client: Client, size: int) -> None:
    for _ in range(size // 100_000):
        client.send(bytes(100_000))
        await client.writer.drain()
        await asyncio.sleep(0.001)


async def test_old_clients_get_no_chunks() -> None:
    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for word in (b"a", b"b"):
            await send({"type": "http.response.body", "body": word, "more_body": True})
        await send({"type": "http.response.body"})

    async with serving(stream) as (_, port):
        async with connected(port) as client:
            client.send(b"GET / HTTP/1.0\r\n\r\n")
            head, _, body = (await client.rest()).partition(b"\r\n\r\n")
            assert body == b"ab"
            assert b"connection: close" in head
        async with connected(port) as client:
            client.send(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            head, _, body = (await client.rest()).partition(b"\r\n\r\n")
            assert body == b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n"
            assert b"transfer-encoding: chunked\r\nconnection: close" in head
        async with connected(port) as client:
            client.send(b"HEAD / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            assert (await client.rest()).endswith(b"connection: close\r\n\r\n")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"garbage\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400),
        (b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n", 400),
        (b"GET /\xff\xfe HTTP/1.1\r\nhost: a\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 300 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 500_000, 431),
        (b"GET /" + b"a" * 500_000, 431),
    ],
)
async def test_what_cannot_be_read_gets_a_plain_error(request_bytes: bytes, status: int) -> None:
    async with serving(Echo()) as (_, port), connected(port) as client:
        client.send(request_bytes)
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b"connection: close" in answer


@pytest.mark.parametrize("endless", [b"x", b"1;" + b"e" * 1000, b"0\r\nt: " + b"e" * 1000])
async def test_endless_trailers_and_extensions_end(endless: bytes) -> None:
    head = b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    async with serving(Echo()) as (server, port), connected(port) as client:
        client.send(head + endless)
        for _ in range(100):
            if not client.writer.transport.is_closing():
                client.send(b"e" * 10_000)
            await asyncio.sleep(0)
        await until(lambda: not server.connections or only(server)._parser is None)


async def test_garbage_behind_a_request_comes_after_its_answer() -> None:
    echo = Echo()
    async with serving(echo) as (_, port), connected(port) as client:
        client.send(POST % 3)
        await until(lambda: echo.scopes)
        client.send(b"abcGARBAGE\r\n\r\n")
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert answer.endswith(b"connection: close\r\n\r\nabc")


async def test_a_client_that_leaves_is_noticed_at_once() -> None:
    noticed = asyncio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.start", "status": 200, "headers": []})  # Nobody gets it.
        noticed.set()
        raise ClientLeft

    async with serving(wait) as (_, port):
        for end in ("close", "reset"):
            async with connected(port) as client:
                client.send(POST % 2 + b"{}")
                await asyncio.sleep(0.05)
                sock = client.writer.get_extra_info("socket")
                if end == "reset":
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
                    client.writer.transport.abort()
                else:
                    client.writer.close()
                await asyncio.wait_for(noticed.wait(), 1)
                noticed.clear()


async def test_slow_heads_bodies_and_idle_connections_end() -> None:
    now = asyncio.get_running_loop().time
    async with serving(Echo()) as (server, port):
        for sent, seconds, end in (  # This application answers no errors.
            (b"", limits.HEAD_SECONDS, b""),
            (b"GET / HTTP/1.1\r\nx", limits.HEAD_SECONDS, b"HTTP/1.1 408"),
            (POST % 10 + b"a", limits.BODY_SECONDS, b"HTTP/1.1 500"),
            (GET, limits.IDLE_SECONDS, b""),
        ):
            async with connected(port) as client:
                client.send(sent)
                await until(lambda: server.connections)
                if sent == GET:
                    await client.answer()
                await asyncio.sleep(0.05)
                only(server).check_time(now() + seconds - 1)
                await asyncio.sleep(0.01)
                assert not client.reader.at_eof()
                only(server).check_time(now() + seconds + 1)
                assert (await client.rest())[:12] == end
            await until(lambda: not server.connections)


async def test_a_body_that_comes_at_a_moderate_pace_is_read() -> None:
    now = asyncio.get_running_loop().time
    async with serving(Echo()) as (server, port), connected(port) as client:
        client.send(POST % 100_000)
        await until(lambda: server.connections)
        for _ in range(5):
            await asyncio.sleep(0.01)
            only(server)._deadline -= limits.BODY_SECONDS - 0.5  # As if so much time had passed.
            client.send(bytes(20_000))
            await asyncio.sleep(0.05)
            only(server).check_time(now() + 1)
        assert len((await client.answer())[1]) == 100_000


@pytest.mark.parametrize("direct", [False, True])
async def test_a_stream_waits_for_a_client_that_does_not_read(direct: bool) -> None:
    written = 0

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal written
        await send({"type": "http.response.start", "status": 200, "headers": []})
        write = scope["extensions"][WRITE_NOW]
        for _ in range(2000):
            if not direct or not write(bytes(10_000)):
                await send({"type": "http.response.body", "body": bytes(10_000), "more_body": True})
            written += 10_000
        await send({"type": "http.response.body"})

    async with serving(stream) as (server, port), connected(port) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(GET)
        await until(lambda: server.connections and not only(server).is_writable)
        await asyncio.sleep(0.1)
        before = written
        assert before < 19_000_000
        await asyncio.sleep(0.1)
        assert written == before
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        body = await client.reader.readuntil(b"0\r\n\r\n")
        assert len(body) > 20_000_000


async def test_a_client_that_never_reads_is_cut_in_the_end() -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"50000000"), (b"x", b"y")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(50_000_000)})

    now = asyncio.get_running_loop().time
    async with serving(answer) as (server, port), connected(port) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        await until(lambda: server.connections and only(server).transport.is_closing())
        only(server).check_time(now() + 31)
        await asyncio.sleep(0.05)
        for passed in (62, 93):
            if server.connections:
                only(server).check_time(now() + passed)
            await asyncio.sleep(0.05)
        await until(lambda: not server.connections)


async def test_an_application_that_fails() -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/late":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"some", "more_body": True})
        if scope["path"] == "/header":
            headers = [(b"x", b"a\r\nset-cookie: b")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        raise ValueError

    async with serving(fail) as (_, port):
        for path, status, end in (
            (b"/", 500, b"\r\n\r\n"),
            (b"/header", 500, b"\r\n\r\n"),
            (b"/late", 200, b"some\r\n"),
        ):
            async with connected(port) as client:
                client.send(b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % path)
                answer = await client.rest()
                assert answer.startswith(b"HTTP/1.1 %d " % status)
                assert answer.endswith(end), "a stream that is not complete has no last chunk"
                assert b"set-cookie" not in answer


async def test_clients_that_offer_another_protocol_go_on_with_this_one() -> None:
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: x\r\n\r\n"
    async with serving(Echo()) as (_, port), connected(port) as client:
        client.send(POST[:-2] % 4 + offer + b"body" + POST % 4 + b"next")
        assert (await client.answer())[1] == b"body"
        assert (await client.answer())[1] == b"next"
        client.send(GET[:-2] + offer)
        assert (await client.answer())[1] == b""


async def test_a_request_without_a_host_has_an_empty_one() -> None:
    echo = Echo()
    async with serving(echo) as (_, port), connected(port) as client:
        client.send(b"GET / HTTP/1.0\r\n\r\n")
        await client.rest()
    assert echo.scopes[0]["headers"] == [(b"host", b"")]


async def test_the_end_waits_for_answers_and_closes_idle_connections() -> None:
    go_on = asyncio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/wait":
            await go_on.wait()
        await Echo()(scope, receive, send)

    async with serving(wait) as (server, port), connected(port) as idle, connected(port) as busy:
        idle.send(GET)
        await idle.answer()
        busy.send(b"GET /wait HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await until(lambda: server.tasks)
        closing = asyncio.create_task(server.close())
        assert await idle.rest() == b""
        assert not closing.done()
        go_on.set()
        assert (await busy.answer())[0].startswith(b"HTTP/1.1 200")
        assert await busy.rest() == b""
        await closing
        with pytest.raises(OSError, match=r".*"):
            await asyncio.open_connection("127.0.0.1", port)


async def test_further_connections_than_the_most_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("singletree.server.http.http_server.MOST_CONNECTIONS", 1)
    async with serving(Echo()) as (_, port), connected(port) as first:
        first.send(GET)
        await first.answer()
        async with connected(port) as second:
            second.send(GET)
            assert await _ended(second)
        first.send(GET)
        await first.answer()


async def _ended(client: Client) -> bool:
    try:
        return await client.rest() == b""
    except ConnectionError:
        return True
