"""Bytes of HTTP clients, cut at every place, without a socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from singletree.server.answers.client_link import ON_DISCONNECT, WRITE_NOW
from singletree.server.http.app import App
from singletree.server.http.connection import BODY_SECONDS, HEAD_BYTES, HEAD_SECONDS, Connection
from singletree.server.http.http_server import HttpServer

from .serving import serving

REQUESTS = (
    b"POST /a?b=c HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello"
    b"POST /chunks HTTP/1.1\r\nhost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\none\r\n4;x=y\r\nmore\r\n0\r\nT: trailer\r\n\r\n"
    b"GET /ws HTTP/1.1\r\nhost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    b"HEAD /last HTTP/1.1\r\nhost: localhost\r\nConnection: close\r\n\r\n"
)
SEEN = [
    ("POST", "/a", b"b=c", b"hello"),
    ("POST", "/chunks", b"", b"onemore"),
    ("GET", "/ws", b"", b""),
    ("HEAD", "/last", b"", b""),
]


class MemoryTransport:
    """Keeps what is written to it.

    Attributes:
        written: all of it.
        writes: in how many calls.
        is_reading: whether the client's bytes are wanted now.
    """

    def __init__(self) -> None:
        self.written = b""
        self.writes = 0
        self.is_reading = True
        self._is_closing = False

    def write(self, data: bytes) -> None:
        assert not self._is_closing
        self.written += data
        self.writes += 1

    def writelines(self, pieces: list[bytes]) -> None:
        self.write(b"".join(pieces))

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Nothing: the end of the answers shows in ``is_closing``."""

    abort = close

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else None

    def get_write_buffer_size(self) -> int:
        return 0


class Answerer:
    """Answers each request with its path, in two parts.

    Attributes:
        seen: method, path, query and body of each request that came whole.
        left: how many clients left before that.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, bytes, bytes]] = []
        self.left = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left += 1
                return
            body, more = body + message["body"], message["more_body"]
        self.seen.append((scope["method"], scope["path"], scope["query_string"], body))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"to ", "more_body": True})
        await send({"type": "http.response.body", "body": scope["path"].encode()})


def connect(app: ASGIApp) -> tuple[Connection, MemoryTransport]:
    """A connection of a server that does not listen."""
    connection, transport = Connection(HttpServer(app)), MemoryTransport()
    connection.connection_made(cast("asyncio.Transport", transport))
    return connection, transport


async def give(connection: Connection, transport: MemoryTransport, *pieces: bytes) -> None:
    """Give the connection what a client sends, while it wants it."""
    for piece in pieces:
        for _ in range(50):
            if transport.is_reading:
                break
            await asyncio.sleep(0)
        connection.data_received(piece)
    for _ in range(50):
        await asyncio.sleep(0)


def without_dates(written: bytes) -> list[bytes]:
    """Return the lines of the answers."""
    return [line for line in written.split(b"\r\n") if not line.startswith(b"date: ")]


async def test_requests_cut_anywhere_get_the_same_answers() -> None:
    app = Answerer()
    connection, transport = connect(app)
    await give(connection, transport, REQUESTS)
    assert app.seen == SEEN
    whole = without_dates(transport.written)
    assert whole.count(b"HTTP/1.1 200 OK") == len(SEEN)
    assert whole.count(b"/chunks") == 1
    assert transport.is_closing()
    for at in range(1, len(REQUESTS)):
        app = Answerer()
        connection, transport = connect(app)
        await give(connection, transport, REQUESTS[:at], REQUESTS[at:])
        assert (at, app.seen) == (at, SEEN)
        assert (at, without_dates(transport.written)) == (at, whole)
        connection.connection_lost(None)
    app = Answerer()
    connection, transport = connect(app)
    await give(connection, transport, *(REQUESTS[at : at + 1] for at in range(len(REQUESTS))))
    assert app.seen == SEEN
    assert without_dates(transport.written) == whole


HOST = b"host: localhost\r\n"
BODY = b"3\r\none\r\n0\r\n\r\n"
UPGRADE = b"Connection: Upgrade\r\nUpgrade: websocket\r\n"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /a HTTP/1.1\r\n" + HOST + HOST, 400),
        (b"GET /a HTTP/1.1\r\n" + HOST + b"HOST: page.example\r\n", 400),
        (b"GET /a HTTP/1.1\r\n" + HOST + HOST + UPGRADE, 400),
        (b"GET /a HTTP/1.0\r\n" + HOST + HOST, 400),
        (b"GET /a HTTP/1.1\r\n", 400),
        (b"GET /a HTTP/1.1\r\n" + UPGRADE, 400),
        (b"GET /a HTTP/2.0\r\n" + HOST, 505),
        (b"GET /a HTTP/0.9\r\n" + HOST, 505),
        (b"GET /a HTTP/2.0\r\n" + HOST + UPGRADE, 505),
        (b"GET http://page.example/a HTTP/1.1\r\n" + HOST, 400),
        (b"GET http://localhost:80/a HTTP/1.1\r\n" + HOST, 400),
        (b"GET http://user@localhost/a HTTP/1.1\r\n" + HOST, 400),
        (b"GET http://page.example/a HTTP/1.0\r\n", 400),
        (b"GET /a#/b HTTP/1.1\r\n" + HOST, 400),
        (b"POST /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: gzip, chunked\r\n", 501),
        (b"POST /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n", 501),
        (b"POST /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked, chunked\r\n", 400),
        (
            b"POST /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
            400,
        ),
        (b"POST /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: identity, chunked\r\n", 501),
        (b"POST /a HTTP/1.0\r\n" + HOST + b"Transfer-Encoding: chunked\r\n", 501),
        (b"POST /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: gzip\r\n", 501),
        (b"POST /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: \x0bchunked\r\n", 400),
        (b"POST /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: xchunked\r\n", 501),
        (b"POST /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding : chunked\r\n", 400),
        (b"POST /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n", 400),
        (b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\nContent-Length: 4\r\n", 400),
        (b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: 3, 3\r\n", 400),
        (b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: +3\r\n", 400),
        (b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: 0x3\r\n", 400),
        (b"POST /a HTTP/1.1\r\n" + HOST + b"X: y\r\n Content-Length: 3\r\n", 400),
    ],
)
async def test_a_head_that_a_proxy_may_read_otherwise_is_refused(head: bytes, status: int) -> None:
    app = Answerer()
    connection, transport = connect(app)
    follows = b"GET /smuggled HTTP/1.1\r\n" + HOST + b"\r\n"
    await give(connection, transport, head + b"\r\n" + BODY + follows)
    assert transport.written.startswith(b"HTTP/1.1 %d " % status)
    assert transport.written.count(b"HTTP/1.1 ") == 1
    assert app.seen == []


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GE T /a HTTP/1.1\r\n" + HOST, 400),
        (b"GET /a HTTP/1.1\r\n" + HOST + b"no colon\r\n", 400),
        (b"GET /a HTTP/1.1\r\n" + HOST + b"X: y\r\n folded\r\n", 400),
        (b"GET /a HTTP/1.1\r\n" + HOST + b"X: y\0z\r\n", 400),
        (b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: -3\r\n", 400),
        (b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: 99999999999999999999999\r\n", 400),
        (b"GET /a HTTP/1.1\r\n" + HOST + b"X: " + b"y" * 2 * HEAD_BYTES + b"\r\n", 431),
        (b"GET /a HTTP/3.0\r\n" + HOST, 505),
        (b"GET /a HTTP/1.2\r\n" + HOST, 505),
        (b"GET /a HTTP/x.y\r\n" + HOST, 400),
    ],
)
async def test_a_damaged_head_gets_one_answer_wherever_it_comes(head: bytes, status: int) -> None:
    good = b"GET /good HTTP/1.1\r\n" + HOST + b"\r\n"
    pieces = [head[at : at + 2**16] for at in range(0, len(head), 2**16)]
    app = Answerer()
    connection, transport = connect(app)
    await give(connection, transport, *pieces, b"\r\n" + BODY + good)
    assert transport.written.startswith(b"HTTP/1.1 %d " % status)
    assert transport.written.count(b"HTTP/1.1 ") == 1
    assert b"\r\nconnection: close\r\n" in transport.written
    assert app.seen == []
    if len(pieces) > 1:
        return
    # Behind a request that is being answered, the answer to that one is the last.
    connection, transport = connect(app)
    await give(connection, transport, good + head + b"\r\n" + BODY + good)
    assert [each[1] for each in app.seen] == ["/good"]
    assert transport.written.startswith(b"HTTP/1.1 200 ")
    assert transport.written.count(b"HTTP/1.1 ") == 1
    assert transport.written.endswith(b"/good\r\n0\r\n\r\n")
    assert b"\r\nconnection: close\r\n" in transport.written
    connection.check_time(asyncio.get_running_loop().time() + 6)
    assert transport.is_closing()


CHUNKED = b" HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
SHAPES = {
    b"/v1/messages": ("invalid_request_error", "timeout_error"),
    b"/v1/chat/completions": ("invalid_request_error", "invalid_request_error"),
    b"/v1/responses": ("invalid_request_error", "invalid_request_error"),
    b"/v1/completions": ("invalid_request_error", "invalid_request_error"),
}


@pytest.mark.parametrize("path", SHAPES)
@pytest.mark.parametrize("size", [1, 300_000])
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"xyz\r\n", 400),
        (b"-5\r\n", 400),
        (b"5 ;\r\n", 400),
        (b"3\r\nfour\r\n", 400),
        (b"ffffffffffffffffffff\r\n", 400),
        (b"0\r\nno colon\r\n\r\n", 400),
        (b"5\r\nhe", 408),
        (b"0\r\n", 408),
    ],
)
async def test_a_body_that_breaks_is_answered_once_by_its_protocol(
    sent: bytes, status: int, size: int, path: bytes
) -> None:
    async with serving() as served:
        connection, transport = connect(App(served.service))
        begun = b"POST " + path + CHUNKED + b"%x\r\n%b\r\n" % (size, b" " * size)
        follows = b"" if status == 408 else b"GET /smuggled HTTP/1.1\r\n" + HOST + b"\r\n"
        await give(connection, transport, begun, sent, follows)
        if status == 408:
            assert transport.written == b""
            connection.check_time(asyncio.get_running_loop().time() + BODY_SECONDS + 1)
        await give(connection, transport, b"what comes later")
        async with asyncio.timeout(10):  # The first request for a protocol loads it, in a thread.
            while not transport.written:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await give(connection, transport)
        head, _, body = transport.written.rpartition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status)
        assert head.count(b"HTTP/1.1 ") == 1
        assert b"\r\nconnection: close\r\n" in head + b"\r\n"
        assert json.loads(body)["error"]["type"] == SHAPES[path][status == 408]
        connection.check_time(asyncio.get_running_loop().time() + 6)
        assert transport.is_closing()
        assert not connection._server.tasks
        connection.connection_lost(None)


async def test_half_a_head_is_answered_when_its_time_is_over() -> None:
    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        await more.wait()
        await Answerer()(scope, receive, send)

    more = asyncio.Event()
    for before in (b"", b"GET /a HTTP/1.1\r\n" + HOST + b"\r\n"):
        connection, transport = connect(wait)
        await give(connection, transport, before + b"GET /b HT")
        connection.check_time(asyncio.get_running_loop().time() + HEAD_SECONDS + 1)
        assert transport.written.startswith(b"" if before else b"HTTP/1.1 408 ")
        more.set()
        await give(connection, transport)
        assert transport.written.count(b"HTTP/1.1 ") == 1
        more.clear()
        connection.connection_lost(None)


async def test_a_target_may_have_the_name_of_the_server() -> None:
    app = Answerer()
    connection, transport = connect(app)
    asked = b"GET http://LocalHost:8000/a?b HTTP/1.1\r\nhost: localhost:8000\r\n\r\n"
    old = b"GET /b HTTP/1.0\r\n\r\n"
    await give(connection, transport, asked + old)
    assert [each[1] for each in app.seen] == ["/a", "/b"]


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_client_that_leaves_anywhere_is_noticed(leaves: bool) -> None:
    for at in range(1, len(REQUESTS)):
        app = Answerer()
        connection, transport = connect(app)
        await give(connection, transport, REQUESTS[:at])
        assert app.seen == SEEN[: len(app.seen)]
        if leaves:
            connection.connection_lost(ConnectionResetError())
        else:
            connection.eof_received()
            connection.connection_lost(None)
        for _ in range(5):
            await asyncio.sleep(0)
        assert app.left <= 1
        assert app.seen == SEEN[: len(app.seen)]
        server = connection._server
        assert not server.connections
        assert not server.tasks


async def test_an_answer_that_is_complete_at_once_is_one_write() -> None:
    connection, transport = connect(Answerer())
    await give(connection, transport, b"GET /a HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert transport.writes == 1
    connection.connection_lost(None)


@pytest.mark.parametrize("status", [529, 499])
async def test_a_status_without_a_phrase_is_sent(status: int) -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"busy"})

    connection, transport = connect(answer)
    await give(connection, transport, b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
    assert transport.written.startswith(b"HTTP/1.1 %d \r\n" % status)
    assert transport.written.endswith(b"busy")
    connection.connection_lost(None)


async def test_the_head_waits_for_no_body() -> None:
    async def opens(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await more.wait()
        await send({"type": "http.response.body", "body": b"last", "more_body": True})
        raise RuntimeError("the application fails")

    more = asyncio.Event()
    connection, transport = connect(opens)
    await give(connection, transport, b"GET /a HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert transport.writes == 1
    assert transport.written.endswith(b"5\r\nfirst\r\n")
    more.set()
    await give(connection, transport)
    assert transport.written.endswith(b"4\r\nlast\r\n")
    assert transport.is_closing(), "without the end, so that the client sees that it is not complete"
    connection.connection_lost(None)


HEAD = b"host: localhost\r\n\r\n"


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("last", [b"", b"last"])
@pytest.mark.parametrize(
    ("request_line", "headers", "ending"),
    [
        (b"GET /a HTTP/1.1", [], b"4\r\nlast\r\n"),
        (b"GET /a HTTP/1.0", [], b"last"),
        (b"GET /a HTTP/1.1", [(b"content-length", b"9")], b"last"),
    ],
)
async def test_the_last_piece_and_the_end_of_the_body_are_one_write(
    request_line: bytes, headers: list[tuple[bytes, bytes]], ending: bytes, last: bytes, direct: bool
) -> None:
    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await more.wait()
        if direct:
            assert scope["extensions"][WRITE_NOW](last, True)
        else:
            await send({"type": "http.response.body", "body": last})

    more = asyncio.Event()
    connection, transport = connect(stream)
    await give(connection, transport, request_line + b"\r\n" + HEAD)
    begun = len(transport.written)
    more.set()
    await give(connection, transport)
    is_chunked = not headers and b"1.1" in request_line
    expected = (ending if last else b"") + (b"0\r\n\r\n" if is_chunked else b"")
    assert transport.written[begun:] == expected
    assert transport.writes == 1 + bool(expected)
    assert transport.is_closing() == (b"1.0" in request_line or (bool(headers) and not last))
    connection.connection_lost(None)


@pytest.mark.parametrize("is_early", [False, True])
async def test_a_client_that_leaves_is_reported_without_a_task(is_early: bool) -> None:
    reports: list[str] = []

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        on_disconnect = scope["extensions"][ON_DISCONNECT]
        if not is_early:
            assert on_disconnect(lambda: reports.append("dropped"))
            assert on_disconnect(lambda: reports.append("left"))
            begun.set()
        await more.wait()
        if is_early:
            reports.append(str(on_disconnect(lambda: reports.append("late"))))

    begun, more = asyncio.Event(), asyncio.Event()
    connection, transport = connect(wait)
    await give(connection, transport, b"GET /a HTTP/1.1\r\n" + HEAD)
    assert begun.is_set() != is_early
    connection.connection_lost(None)
    more.set()
    await give(connection, transport)
    assert reports == ["False" if is_early else "left"]
    assert not connection._server.tasks
