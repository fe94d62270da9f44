"""``HttpTransport`` over connections at whose other end there is no socket: the test says what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from engines.vllm_recording import URL
from singletree.remote.http_client import HttpTransport, MakeConnection
from singletree.remote.http_connection import HttpConnection
from singletree.remote.transport import StreamedResponse


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
        self.unsent = 0
        self._hears = hears
        self._closing = self._lost = False

    def write(self, data: Any) -> None:
        self.heard += bytes(data)
        asyncio.get_running_loop().call_soon(self._hears, self)

    def writelines(self, data: Any) -> None:
        self.write(b"".join(data))

    def receive(self, *data: bytes) -> None:
        for piece in data:
            if not self._closing:
                self.protocol.data_received(piece)

    def drop(self, error: Exception | None = None) -> None:
        if not self._lost:
            self._closing = self._lost = True
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
        self._closing = True
        asyncio.get_running_loop().call_soon(self.drop)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._closing

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def is_reading(self) -> bool:
        return not self.paused


class Bench:
    """A transport whose connections lead to the test, which answers the n-th request with ``say[n]``.

    Attributes:
        wires: the connections so far.
        asked: how many requests have come.
        heard: set when the first one has.
        refuses: what opening a connection raises.
    """

    def __init__(self, *receive: Callable[[Wire], None], url: str = URL, **options: Any) -> None:
        self._answers = receive
        self.wires: list[Wire] = []
        self.asked = 0
        self.heard = asyncio.Event()
        self.refuses: Exception | None = None
        self.transport = HttpTransport(url, connect=self._connect, **options)

    async def _connect(self, make: MakeConnection) -> HttpConnection:
        await asyncio.sleep(0)
        if self.refuses is not None:
            raise self.refuses
        connection = make()
        self.wires.append(Wire(connection, self._hear))
        connection.connection_made(self.wires[-1])
        return connection

    def _hear(self, wire: Wire) -> None:
        whole_requests = sum(len(each.requests()) for each in self.wires)
        if whole_requests > self.asked:
            self.asked = whole_requests
            self.heard.set()
            self._answers[self.asked - 1](wire)

    async def __aenter__(self) -> Bench:
        await self.transport.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.transport.close()

    async def post(self, body: bytes = b"{}") -> StreamedResponse:
        """An answer that has begun."""
        answer = self.transport.post("/v1/completions", body)
        await answer.begin()
        return answer


async def read(answer: StreamedResponse) -> bytes:
    """The next bytes of an answer; empty at its end."""
    found: list[bytes] = []

    def take(data: bytes) -> bool:
        found.append(data)
        return False

    await answer.relay(take)
    return found[0]


async def read_all(bench: Bench, body: bytes = b"{}") -> list[bytes]:
    """The pieces of a whole answer."""
    answer = await bench.post(body)
    pieces = []
    while data := await read(answer):
        pieces.append(data)
    return pieces


def says(*data: bytes) -> Callable[[Wire], None]:
    """Answer with ``data``, in reads of their own."""
    return lambda wire: wire.receive(*data)


def hangs_up(*data: bytes) -> Callable[[Wire], None]:
    """Answer with ``data`` and close the connection."""

    def script(wire: Wire) -> None:
        wire.receive(*data)
        asyncio.get_running_loop().call_soon(wire.drop)

    return script
