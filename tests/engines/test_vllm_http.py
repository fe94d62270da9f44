"""``AiohttpTransport`` with aiohttp's own connections, at whose other end there is no socket."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from engines.vllm_memory import ending, event
from engines.vllm_recording import PARIS, QUESTION, URL, Exchange, vllm_engine
from singletree.conversation import Sampling
from singletree.engines.engine import GenerationJob
from singletree.engines.remote.transport import AiohttpTransport, ConnectionLost
from singletree.errors import EngineFailed


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


def head(status: int = 200, **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items()), "", ""]
    return "\r\n".join(lines).encode()


STREAM = head(content_type="text/event-stream", transfer_encoding="chunked")
END = b"0\r\n\r\n"


def whole(status: int, body: bytes, **headers: str) -> bytes:
    return head(status, content_length=str(len(body)), **headers) + body


class Wire(asyncio.Transport):
    """One connection: collects what the client writes; the test says what comes back."""

    def __init__(self, protocol: asyncio.Protocol, hears: Callable[[Wire], None]) -> None:
        super().__init__()
        self.protocol = protocol
        self.heard = b""
        self.paused = False
        self._hears = hears
        self._closing = False

    def write(self, data: Any) -> None:
        self.heard += bytes(data)
        asyncio.get_running_loop().call_soon(self._hears, self)

    def writelines(self, data: Any) -> None:
        self.write(b"".join(data))

    def say(self, *data: bytes) -> None:
        for piece in data:
            if not self._closing:
                self.protocol.data_received(piece)

    def drop(self, error: Exception | None = None) -> None:
        if not self._closing:
            self._closing = True
            self.protocol.connection_lost(error)

    def requests(self) -> list[tuple[bytes, dict[bytes, bytes], bytes]]:
        """(request line, headers, body) of each whole request so far."""
        found, rest = [], self.heard
        while b"\r\n\r\n" in rest:
            top, rest = rest.split(b"\r\n\r\n", 1)
            line, *lines = top.split(b"\r\n")
            headers = {name.lower(): value.strip() for name, value in (each.split(b":", 1) for each in lines)}
            length = int(headers.get(b"content-length", b"0"))
            if len(rest) < length:
                break
            found.append((line, headers, rest[:length]))
            rest = rest[length:]
        return found

    def close(self) -> None:
        asyncio.get_running_loop().call_soon(self.drop)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._closing

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def is_reading(self) -> bool:
        return not self.paused


class Server(aiohttp.BaseConnector):
    """Opens wires. ``script`` is called for each whole request, with its wire and its number."""

    def __init__(self, script: Callable[[Wire, int], None]) -> None:
        super().__init__(limit=0)
        self.wires: list[Wire] = []
        self.asked = 0
        self.refuses: Exception | None = None
        self.heard = asyncio.Event()
        self._script = script

    async def _create_connection(self, *_: Any) -> Any:
        if self.refuses is not None:
            raise self.refuses
        protocol = self._factory()
        self.wires.append(Wire(protocol, self._hear))
        protocol.connection_made(self.wires[-1])
        return protocol

    def _hear(self, wire: Wire) -> None:
        whole_requests = sum(len(each.requests()) for each in self.wires)
        if whole_requests > self.asked:
            self.asked = whole_requests
            self.heard.set()
            self._script(wire, self.asked - 1)


class Bench:
    """A transport whose connections lead to ``server``, which answers the n-th request with ``say[n]``."""

    def __init__(self, *say: Callable[[Wire], None], **options: Any) -> None:
        self._say = say
        self.server: Server
        self.transport = AiohttpTransport(URL, connect=self._connect, **options)

    def _connect(self) -> Server:
        self.server = Server(lambda wire, number: self._say[number](wire))
        return self.server

    async def __aenter__(self) -> Bench:
        await self.transport.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.transport.close()


def says(*data: bytes) -> Callable[[Wire], None]:
    return lambda wire: wire.say(*data)


def hangs_up(*data: bytes) -> Callable[[Wire], None]:
    def script(wire: Wire) -> None:
        wire.say(*data)
        asyncio.get_running_loop().call_soon(wire.drop)

    return script


@pytest.fixture(autouse=True)
async def no_warnings() -> AsyncIterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


async def read_all(bench: Bench, body: bytes = b"{}") -> list[bytes]:
    answer = await bench.transport.post("/v1/completions", body)
    pieces = []
    while data := await answer.read():
        pieces.append(data)
    return pieces


async def test_get() -> None:
    async with Bench(says(whole(200, b'{"version": "1"}')), api_key="secret") as bench:
        assert await bench.transport.get("/version") == (200, b'{"version": "1"}')
        line, headers, _ = bench.server.wires[0].requests()[0]
    assert line == b"GET /version HTTP/1.1"
    assert headers[b"authorization"] == b"Bearer secret"
    assert headers[b"accept-encoding"] == b"identity"


async def test_post_sends_the_body_as_it_is() -> None:
    async with Bench(says(STREAM, END)) as bench:
        await read_all(bench, b'{"prompt":[1]}')
        line, headers, body = bench.server.wires[0].requests()[0]
    assert (line, body) == (b"POST /v1/completions HTTP/1.1", b'{"prompt":[1]}')
    assert headers[b"content-type"] == b"application/json"
    assert b"authorization" not in headers


async def test_a_very_long_prompt_goes_out_whole_and_without_complaint() -> None:
    body = json.dumps({"prompt": list(range(300_000))}).encode()
    async with Bench(says(STREAM, END)) as bench:
        await read_all(bench, body)
        assert bench.server.wires[0].requests()[0][2] == body


async def test_pieces_come_as_they_arrive() -> None:
    async with Bench(says(STREAM)) as bench:
        answer = await bench.transport.post("/v1/completions", b"{}")
        for piece in (b"data: 1\n\n", b"data: 2\n\n"):
            bench.server.wires[0].say(chunked(piece))
            assert await answer.read() == piece
        bench.server.wires[0].say(END)
        assert await answer.read() == b""


async def test_status_and_retry_after() -> None:
    async with Bench(says(whole(503, b"busy", retry_after="4"))) as bench:
        answer = await bench.transport.post("/v1/completions", b"{}")
        assert (answer.status, answer.retry_after, await answer.read()) == (503, "4", b"busy")


async def test_a_finished_answer_leaves_its_connection_in_use() -> None:
    async with Bench(says(STREAM, chunked(b"a"), END), says(STREAM, chunked(b"b"), END)) as bench:
        for expected in (b"a", b"b"):
            answer = await bench.transport.post("/v1/completions", b"{}")
            assert await answer.read() == expected
            await answer.finish()
            answer.close()
        assert len(bench.server.wires) == 1


async def test_closing_an_unfinished_answer_hangs_up() -> None:  # C40
    async with Bench(says(STREAM, chunked(b"a"))) as bench:
        answer = await bench.transport.post("/v1/completions", b"{}")
        waiting = asyncio.create_task(_twice(answer.read))
        await asyncio.sleep(0)
        answer.close()
        with pytest.raises(ConnectionLost, match="broke"):
            await waiting
        await asyncio.sleep(0)
        assert bench.server.wires[0].is_closing()


async def _twice(read: Callable[[], Any]) -> None:
    await read()
    await read()


async def test_cancelling_a_post_hangs_up() -> None:
    async with Bench(says()) as bench:
        posting = asyncio.create_task(bench.transport.post("/v1/completions", b"{}"))
        await bench.server.heard.wait()
        posting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await posting
        await asyncio.sleep(0)
        assert bench.server.wires[0].is_closing()


@pytest.mark.parametrize(
    "script",
    [hangs_up(), hangs_up(head(200)[:9]), says(b"this is not HTTP\r\n\r\n")],
    ids=["nothing", "half a head", "no HTTP"],
)
async def test_a_server_that_breaks_off_before_its_answer(script: Callable[[Wire], None]) -> None:  # C39
    async with Bench(script) as bench:
        with pytest.raises(ConnectionLost, match="broke"):
            await bench.transport.post("/v1/completions", b"{}")
    async with Bench(script, script) as bench:
        with pytest.raises(ConnectionLost, match="broke"):
            await bench.transport.get("/version")


async def test_a_server_that_breaks_off_in_the_midst() -> None:
    async with Bench(says(STREAM, chunked(b"a"))) as bench:
        answer = await bench.transport.post("/v1/completions", b"{}")
        assert await answer.read() == b"a"
        bench.server.wires[0].drop(ConnectionResetError())
        with pytest.raises(ConnectionLost, match="broke"):
            await answer.read()
        answer.close()


async def test_a_server_that_goes_silent() -> None:
    async with Bench(says(STREAM, chunked(b"a")), read_timeout=0.01) as bench:
        answer = await bench.transport.post("/v1/completions", b"{}")
        assert await answer.read() == b"a"
        with pytest.raises(ConnectionLost, match="sent nothing for too long"):
            await answer.read()
        answer.close()


async def test_a_server_that_never_answers() -> None:
    async with Bench(says(), read_timeout=0.01) as bench:
        with pytest.raises(ConnectionLost, match="sent nothing for too long"):
            await bench.transport.post("/v1/completions", b"{}")


@pytest.mark.parametrize(
    "refusal",
    [
        aiohttp.ClientConnectorError(None, ConnectionRefusedError(111, "refused")),  # type: ignore[arg-type]
        aiohttp.ConnectionTimeoutError("slow"),
    ],
)
async def test_a_server_that_is_not_there(refusal: Exception) -> None:
    async with Bench() as bench:
        bench.server.refuses = refusal
        with pytest.raises(ConnectionLost, match="cannot be reached"):
            await bench.transport.get("/version")
        with pytest.raises(ConnectionLost, match="cannot be reached"):
            await bench.transport.post("/v1/completions", b"{}")


async def test_finish_never_raises() -> None:
    async with Bench(says(STREAM, chunked(b"a"))) as bench:
        answer = await bench.transport.post("/v1/completions", b"{}")
        bench.server.wires[0].drop(ConnectionResetError())
        await answer.finish()


async def test_before_open_and_after_close() -> None:
    bench = Bench()
    with pytest.raises(ConnectionLost, match="not started"):
        await bench.transport.get("/version")
    await bench.transport.open()
    await bench.transport.close()
    await bench.transport.close()
    with pytest.raises(ConnectionLost, match="not started, or closed"):
        await bench.transport.post("/v1/completions", b"{}")


async def test_a_slow_reader_slows_the_server() -> None:
    async with Bench(says(STREAM)) as bench:
        answer = await bench.transport.post("/v1/completions", b"{}")
        (wire,) = bench.server.wires
        sent = 0
        while not wire.paused and sent < 100:
            wire.say(chunked(b"x" * 65536))
            sent += 1
        assert wire.paused
        got = 0
        while got < sent * 65536:
            got += len(await answer.read())
        assert not wire.paused
        answer.close()


async def test_engine_over_aiohttp() -> None:
    models, version, answer = (Exchange.load(name).answer for name in ("models", "version", "answer"))
    script = (
        says(whole(200, models)),
        says(whole(200, version)),
        says(whole(404, b"")),  # the size of its cache is hidden
        says(STREAM, chunked(event([7], "length")), chunked(ending()), END),
        says(whole(404, b"{}")),  # it is asked whether it takes pictures
        says(STREAM, *(chunked(answer[i : i + 100]) for i in range(0, len(answer), 100)), END),
        says(STREAM, chunked(event([1]) + event([2], "stop")), chunked(ending()), END),
        hangs_up(STREAM, chunked(event([1]))),
    )
    bench = Bench(*script)
    engine = vllm_engine(transport=bench.transport)
    await engine.start()
    for expected in (PARIS, [1, 2]):
        stream = engine.generate(GenerationJob(QUESTION, Sampling(), "r1"))
        assert [t async for c in stream for t in c.token_ids] == expected
    assert len(bench.server.wires) == 1
    with pytest.raises(EngineFailed, match="broke"):
        assert [c async for c in engine.generate(GenerationJob(QUESTION, Sampling(), "r1"))]
    await engine.close()
