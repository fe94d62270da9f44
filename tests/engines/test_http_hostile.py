"""What ``HttpTransport`` must survive of a server, and what it must not use again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from engines.http_bench import END, STREAM, Bench, Wire, chunked, hangs_up, head, read, read_all, says, whole
from singletree.remote import http_client, http_connection
from singletree.remote.http_client import HttpTransport, MakeConnection
from singletree.remote.http_connection import HttpConnection
from singletree.remote.transport import ConnectionLost, read_answer

INTERIM = b"HTTP/1.1 102 Processing\r\nX: 1\r\n\r\n"
TRAILER = b"0\r\nX-Sum: 7\r\nRetry-After: 9\r\n\r\n"
OK = whole(200, b"ok")
WHOLE: dict[str, tuple[bytes, bytes]] = {
    "length": (OK, b"ok"),
    "empty": (whole(200, b""), b""),
    "chunked": (STREAM + chunked(b"data: 1\n\n", b"data: 2\n\n") + END, b"data: 1\n\ndata: 2\n\n"),
    "interim": (INTERIM * 2 + STREAM + chunked(b"a") + END, b"a"),
    "trailers": (STREAM + chunked(b"a") + TRAILER, b"a"),
    "extensions": (STREAM + b"1;name=value\r\na\r\n0\r\n\r\n", b"a"),
    "large chunk": (STREAM + chunked(b"x" * 300) + END, b"x" * 300),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    "no reason": (b"HTTP/1.1 200\r\nContent-Length: 1\r\n\r\na", b"a"),
}
"""An answer that leaves its connection in use, and its body."""


@pytest.mark.parametrize("name", WHOLE)
async def test_an_answer_may_be_cut_anywhere(name: str) -> None:
    answer, body = WHOLE[name]
    single = [answer[at : at + 1] for at in range(len(answer))]
    halves = [[answer[:cut], answer[cut:]] for cut in range(1, len(answer))]
    script = [says(*pieces) for pieces in ([answer], single, *halves)]
    async with Bench(*script) as bench:
        for _ in script:
            assert b"".join(await read_all(bench)) == body
        assert len(bench.wires) == 1


@pytest.mark.parametrize("name", WHOLE)
async def test_an_answer_may_break_off_anywhere(name: str) -> None:
    answer, body = WHOLE[name]
    for cut in range(len(answer)):
        async with Bench(hangs_up(answer[:cut])) as bench:
            taken: list[bytes] = []
            with pytest.raises(ConnectionLost, match="broke"):  # noqa: PT012
                response = await bench.post()
                await response.relay(lambda data, taken=taken: taken.append(data) or True)  # type: ignore[misc]
            assert body.startswith(b"".join(taken))


@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])
async def test_an_answer_may_end_with_its_connection(version: bytes) -> None:
    async with Bench(hangs_up(version + b" 200 OK\r\n\r\n", b"a", b"b"), says(OK)) as bench:
        assert b"".join(await read_all(bench)) == b"ab"
        assert await read_all(bench) == [b"ok"]
        assert len(bench.wires) == 2


async def test_a_reset_does_not_end_an_answer() -> None:
    async with Bench(says(b"HTTP/1.1 200 OK\r\n\r\na")) as bench:
        answer = await bench.post()
        bench.wires[0].drop(ConnectionResetError())
        assert await read(answer) == b"a"
        with pytest.raises(ConnectionLost, match="broke"):
            await read(answer)


@pytest.mark.parametrize(
    "last",
    [
        head(200, content_length="2", connection="close") + b"ok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        OK + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil",
        OK + b"rubbish",
    ],
    ids=["close", "HTTP/1.0", "a second answer", "rubbish behind"],
)
async def test_a_connection_that_cannot_be_used_again(last: bytes) -> None:
    async with Bench(says(last), says(OK)) as bench:
        assert await read_all(bench) == [b"ok"]
        assert await read_all(bench) == [b"ok"]
        assert len(bench.wires) == 2


@pytest.mark.parametrize("unasked", [b"HTTP/1.1 200 OK\r\n", b"x", b"\r\n" * 40_000])
async def test_what_comes_without_a_request_closes_the_connection(unasked: bytes) -> None:
    async with Bench(says(OK), says(OK)) as bench:
        await read_all(bench)
        bench.wires[0].receive(unasked)
        assert await read_all(bench) == [b"ok"]
        assert len(bench.wires) == 2


async def test_a_request_that_is_not_read_to_its_end_keeps_the_connection_from_others() -> None:
    def refuses(wire: Wire) -> None:
        wire.unsent = 100
        wire.receive(whole(413, b"ok"))

    async with Bench(refuses, says(OK)) as bench:
        assert await read_all(bench) == [b"ok"]
        assert await read_all(bench) == [b"ok"]
        assert len(bench.wires) == 2


def endless(*pieces: bytes) -> Callable[[Wire], None]:
    """Answer with the first piece, and then with the last for as long as anybody listens."""

    def script(wire: Wire) -> None:
        wire.receive(*pieces[:-1])
        for _ in range(1000):
            wire.receive(pieces[-1])

    return script


@pytest.mark.parametrize(
    "script",
    [
        endless(b"HTTP/1.1 200 OK\r\nX: ", b"x" * 1000),
        endless(b"HTTP/1.1 200 OK\r\n", b"X: " + b"x" * 1000 + b"\r\n"),
        endless(b"HTTP/1.1 200 " + b"x" * 1000),
        endless(INTERIM * 10),
        endless(b"\r\n" * 500),
        endless(STREAM, b"1;" + b"x" * 1000),
        endless(STREAM + b"1;", b"x" * 1000),
        endless(STREAM + b"0\r\n", b"X: " + b"x" * 1000 + b"\r\n"),
        endless(STREAM + b"0\r\nX: ", b"x" * 1000),
        endless(STREAM, b"0" * 1000),
    ],
    ids=[
        "a header",
        "headers",
        "a reason",
        "interim answers",
        "empty lines",
        "sizes of chunks",
        "an extension",
        "trailers",
        "a trailer",
        "zeros",
    ],
)
async def test_what_is_no_body_is_limited(script: Callable[[Wire], None]) -> None:
    async with Bench(script) as bench:
        with pytest.raises(ConnectionLost, match="broke"):
            await read_all(bench)
        await asyncio.sleep(0)
        assert bench.wires[0].is_closing()


async def test_many_small_chunks_are_no_attack() -> None:
    async with Bench(says(STREAM, *[chunked(b"x")] * 50_000, END)) as bench:
        assert len(b"".join(await read_all(bench))) == 50_000


async def test_a_page_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "_MAX_PAGE_BYTES", 1000)
    async with Bench(says(whole(200, b"x" * 999)), endless(STREAM, chunked(b"x" * 100))) as bench:
        assert len((await bench.transport.get("/metrics"))[1]) == 999
        with pytest.raises(ConnectionLost, match="more than 1000 bytes"):
            await bench.transport.get("/metrics")
        await asyncio.sleep(0)
        assert bench.wires[0].is_closing()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (whole(307, b"", location="https://elsewhere.test/"), "redirects to 'https://elsewhere.test/'"),
        (whole(301, b"", location="x" * 3000), "redirects to"),
        (whole(200, b"\x1f\x8b", content_encoding="gzip"), "compresses"),
        (b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\nPRI", "broke"),
        (b"HTTP/1.1 99999 X\r\n\r\n", "broke"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok", "broke"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\nok", "broke"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\nok", "broke"),
        (STREAM + b"fffffffffffffffff\r\nok", "broke"),
        (STREAM + b"-1\r\nok", "broke"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "broke"),
        (b"\x16\x03\x01\x00\xa5\x01", "broke"),
        (b"", "broke"),
    ],
)
async def test_an_answer_of_no_use(answer: bytes, reason: str) -> None:
    async with Bench(hangs_up(answer)) as bench:
        with pytest.raises(ConnectionLost, match=reason) as caught:
            await read_all(bench)
        assert len(str(caught.value)) < 300


async def test_a_trailer_is_no_header() -> None:
    async with Bench(says(STREAM + chunked(b"a") + TRAILER)) as bench:
        answer = await bench.post()
        assert (await read_answer(answer, 100), answer.retry_after) == (b"a", "")


@pytest.mark.parametrize("error", [None, ConnectionResetError()])
async def test_a_request_is_sent_again_if_the_connection_was_closed_meanwhile(
    error: Exception | None,
) -> None:
    def closes(wire: Wire) -> None:
        wire.drop(error)

    async with Bench(says(OK), closes, says(whole(200, b"again"))) as bench:
        await read_all(bench)
        assert await read_all(bench, b'{"n":2}') == [b"again"]
        first, second = bench.wires
        assert first.requests()[1] == second.requests()[0]


async def test_a_request_is_sent_again_only_once_and_only_without_an_answer() -> None:
    async with Bench(says(OK), hangs_up(), hangs_up()) as bench:
        await read_all(bench)
        with pytest.raises(ConnectionLost, match="broke") as caught:
            await read_all(bench)
        assert (bench.asked, caught.value.unreachable) == (3, False)
    async with Bench(says(OK), hangs_up(b"H")) as bench:
        await read_all(bench)
        with pytest.raises(ConnectionLost, match="broke"):
            await read_all(bench)
        assert bench.asked == 2


async def test_a_server_that_is_gone_when_the_request_is_sent_again_may_have_seen_it() -> None:
    async with Bench(says(OK), hangs_up()) as bench:
        await read_all(bench)
        bench.refuses = ConnectionRefusedError()
        with pytest.raises(ConnectionLost, match="broke") as caught:
            await read_all(bench)
        assert not caught.value.unreachable


async def test_a_connection_that_was_idle_for_long_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "_IDLE_SECONDS", 0.01)
    async with Bench(says(OK), says(OK)) as bench:
        await read_all(bench)
        assert not bench.wires[0].is_closing()
        await asyncio.sleep(0.05)
        assert bench.wires[0].is_closing(), "and it is closed even if there is no request"
        await read_all(bench)
        assert len(bench.wires) == 2


async def test_a_connection_that_the_server_closed_is_not_used() -> None:
    async with Bench(says(OK), says(OK)) as bench:
        await read_all(bench)
        bench.wires[0].drop()
        assert await read_all(bench) == [b"ok"]
        assert len(bench.wires) == 2


async def test_the_rest_of_a_finished_answer_is_read_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Bench(says(STREAM, chunked(b"a")), says(OK)) as bench:
        answer = await bench.post()
        assert await read(answer) == b"a"
        answer.finish()
        answer.close()
        bench.wires[0].receive(chunked(b"b" * 10**6), END)
        assert await read_all(bench) == [b"ok"]
        assert len(bench.wires) == 1


async def test_a_finished_answer_that_does_not_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "_IDLE_SECONDS", 0.01)
    monkeypatch.setattr(http_client, "_FINISH_SECONDS", 0.01)
    async with Bench(says(STREAM, chunked(b"a")), says(OK)) as bench:
        answer = await bench.post()
        answer.finish()
        for _ in range(5):
            bench.wires[0].receive(chunked(b"b" * 1000))
            await asyncio.sleep(0.01)
        assert bench.wires[0].is_closing()
        assert await read_all(bench) == [b"ok"]


async def test_a_slow_reader_is_no_silent_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "_MAX_UNREAD_BYTES", 10)
    async with Bench(says(STREAM, chunked(b"x" * 100)), read_timeout=0.01) as bench:
        answer = await bench.post()
        (wire,) = bench.wires
        assert wire.paused
        await asyncio.sleep(0.05)
        assert await read(answer) == b"x" * 100
        assert not wire.paused
        with pytest.raises(ConnectionLost, match="sent nothing for too long"):
            await read(answer)


async def test_a_stopped_server_may_end_its_answer_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "_MAX_UNREAD_BYTES", 10)
    async with Bench(says(STREAM, chunked(b"x" * 100)), says(OK)) as bench:
        answer = await bench.post()
        (wire,) = bench.wires
        wire.receive(chunked(b"y" * 100), END)
        assert not wire.paused
        assert await read_all(bench) == [b"ok"]
        assert await read(answer) == b"x" * 100 + b"y" * 100
        assert await read(answer) == b""


async def test_one_that_takes_may_close_the_connection() -> None:
    async with Bench(says(STREAM, chunked(b"a")), says(OK)) as bench:
        answer = await bench.post()

        def take(data: bytes) -> bool:
            if data == b"b":
                answer.close()
            return True

        relaying = asyncio.create_task(answer.relay(take))
        await asyncio.sleep(0)
        bench.wires[0].receive(chunked(b"b") + END)
        with pytest.raises(ConnectionLost, match="broke"):
            await relaying
        assert await read_all(bench) == [b"ok"]
        assert len(bench.wires) == 2


async def test_closing_the_client_ends_everything() -> None:
    async with Bench(says(STREAM), says()) as bench:
        begun = await bench.post()
        waiting = asyncio.create_task(bench.post())
        await asyncio.sleep(0)
        opening = asyncio.create_task(bench.post())
        await asyncio.sleep(0)
        await bench.transport.close()
        for each in (waiting, opening, asyncio.create_task(read(begun))):
            with pytest.raises(ConnectionLost):
                await each
        assert not bench.transport._connections
        assert bench.transport._sweeper is None


@pytest.mark.parametrize(
    ("url", "path", "sent"),
    [
        ("http://gpu:8000", "/v1/models", {"line": "/v1/models", "host": "gpu:8000"}),
        ("http://gpu", "/v1/models", {"line": "/v1/models", "host": "gpu"}),
        ("https://gpu/a b", "/x", {"line": "/a%20b/x", "host": "gpu"}),
        ("http://gpu/p%20q", "/x", {"line": "/p%20q/x", "host": "gpu"}),
        ("http://gpu/\u00e9", "/x", {"line": "/%C3%A9/x", "host": "gpu"}),
        ("http://[::1]:8000", "/x", {"line": "/x", "host": "[::1]:8000"}),
        ("http://b\u00fccher.test", "/x", {"line": "/x", "host": "xn--bcher-kva.test"}),
        ("http://u:p%40@gpu", "/x", {"line": "/x", "host": "gpu", "authorization": "Basic dTpwQA=="}),
    ],
)
async def test_the_url(url: str, path: str, sent: dict[str, str]) -> None:
    async with Bench(says(OK), url=url) as bench:
        await bench.transport.get(path)
        line, headers, _ = bench.wires[0].requests()[0]
    assert line == f"GET {sent.pop('line')} HTTP/1.1".encode()
    for name, value in sent.items():
        assert headers[name.encode()] == value.encode()


class _Network:
    """Addresses of which some answer after a while, some refuse, and some never answer."""

    def __init__(self, **answers: float | Exception) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.resolved = 0
        self.cancelled = 0

    async def getaddrinfo(self, host: str, port: int, **_: Any) -> list[Any]:
        self.resolved += 1
        return [(0, 0, 0, "", (address, port)) for address in self.answers]

    async def create_connection(self, make: MakeConnection, address: str, port: int, **options: Any) -> Any:
        self.asked.append(address)
        answer = self.answers[address]
        if isinstance(answer, Exception):
            raise answer
        try:
            await asyncio.sleep(answer)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        connection: HttpConnection = make()
        wire = Wire(connection, lambda wire: wire.receive(whole(200, address.encode())))
        connection.connection_made(wire)
        return wire, connection


async def _answers(network: _Network, monkeypatch: pytest.MonkeyPatch) -> HttpTransport:
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "getaddrinfo", network.getaddrinfo)
    monkeypatch.setattr(loop, "create_connection", network.create_connection)
    monkeypatch.setattr(http_client, "_STAGGER_SECONDS", 0.01)
    transport = HttpTransport("http://gpu:8000")
    await transport.open()
    return transport


async def test_the_next_address_is_tried_if_one_refuses_or_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    network = _Network(refuses=ConnectionRefusedError(), silent=60.0, quick=0.0, unused=0.0)
    transport = await _answers(network, monkeypatch)
    assert await transport.get("/x") == (200, b"quick")
    assert network.asked == ["refuses", "silent", "quick"]
    await asyncio.sleep(0)
    assert (network.resolved, network.cancelled) == (1, 1)
    await transport.close()


async def test_a_server_none_of_whose_addresses_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = await _answers(_Network(a=ConnectionRefusedError(), b=OSError("no route")), monkeypatch)
    with pytest.raises(ConnectionLost, match="cannot be reached") as caught:
        await transport.get("/x")
    assert caught.value.unreachable
    await transport.close()


async def test_a_server_that_takes_too_long_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "_CONNECT_SECONDS", 0.03)
    network = _Network(a=60.0, b=60.0)
    transport = await _answers(network, monkeypatch)
    with pytest.raises(ConnectionLost, match="cannot be reached"):
        await transport.get("/x")
    await asyncio.sleep(0)
    assert network.cancelled == 2
    await transport.close()
