"""Which HTTP client reads an engine's stream for the least CPU: httpx, aiohttp, or the server's own on httptools.

A server in a process of its own sends one event a token, as llama.cpp does, over a UNIX socket to 1 and 16
streams at once, slowly enough that each is read by itself. Prints the CPU time of the reading process for
each token, and the ratio to the server's own.

    python benchmarks/engine_client.py [--tokens 4000]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import httpx
import uvloop

from singletree.engines.remote.http_client import HttpTransport, MakeConnection
from singletree.engines.remote.http_connection import HttpConnection

EVENT = (
    b'data: {"index":0,"content":" capital","tokens":[3575],"stop":false,"id_slot":-1,"tokens_predicted":2,'
    b'"tokens_evaluated":16}\n\n'
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PACE = 0.001
STREAMS = (1, 16)
URL = "http://engine/completion"

Client = Callable[[str, int], Awaitable[int]]


def serve(path: str, tokens: int) -> None:
    """Answers every connection with the same stream."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        for _ in range(tokens):
            writer.write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
            await asyncio.sleep(PACE)
        writer.write(b"0\r\n\r\n")
        writer.close()

    async def run() -> None:
        async with await asyncio.start_unix_server(answer, path) as server:
            await server.serve_forever()

    uvloop.run(run())


async def events(chunks: AsyncIterator[bytes]) -> int:
    """Cuts the stream into events and counts them."""
    count, rest = 0, b""
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n\n")
        count += len(whole)
    return count


async def with_httpx(path: str, streams: int) -> int:
    """All tokens of all streams, read with httpx."""
    transport = httpx.AsyncHTTPTransport(uds=path)

    async def one(client: httpx.AsyncClient) -> int:
        async with client.stream("POST", URL, content=b"{}") as response:
            return await events(response.aiter_raw())

    async with httpx.AsyncClient(transport=transport, timeout=None) as client:
        return sum(await asyncio.gather(*(one(client) for _ in range(streams))))


async def with_aiohttp(path: str, streams: int) -> int:
    """All tokens of all streams, read with aiohttp."""

    async def one(session: aiohttp.ClientSession) -> int:
        async with session.post(URL, data=b"{}") as response:
            return await events(response.content.iter_any())

    connector = aiohttp.UnixConnector(path, limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        return sum(await asyncio.gather(*(one(session) for _ in range(streams))))


async def with_own(path: str, streams: int) -> int:
    """All tokens of all streams, taken where they are received."""

    async def connect(make: MakeConnection) -> HttpConnection:
        _, connection = await asyncio.get_running_loop().create_unix_connection(make, path)
        return connection

    async def one() -> int:
        count, rest = 0, b""

        def take(data: bytes) -> bool:
            nonlocal count, rest
            *whole, rest = (rest + data).split(b"\n\n")
            count += len(whole)
            return bool(data)

        response = transport.post("/completion", b"{}")
        await response.begin()
        await response.relay(take)
        return count

    transport = HttpTransport("http://engine", connect=connect)
    await transport.open()
    try:
        return sum(await asyncio.gather(*(one() for _ in range(streams))))
    finally:
        await transport.close()


CLIENTS: dict[str, Client] = {"httpx": with_httpx, "aiohttp": with_aiohttp, "own": with_own}


def measure(client: Client, path: str, streams: int) -> float:
    """Microseconds of CPU for each token."""

    async def run() -> int:
        return await client(path, streams)

    begin = time.process_time()
    count = uvloop.run(run())
    return (time.process_time() - begin) / count * 1e6


def main() -> None:
    """Measure all, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4000, help="tokens a stream")
    tokens = parser.parse_args().tokens
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "engine.sock"
        server = multiprocessing.Process(target=serve, args=(str(path), tokens), daemon=True)
        server.start()
        while not path.exists():
            time.sleep(0.05)
        print(f"{'streams':>7}" + "".join(f"{name:>22}" for name in CLIENTS))
        for streams in STREAMS:
            costs = [measure(client, str(path), streams) for client in CLIENTS.values()]
            cells = (f"{cost:>9.1f} µs ({cost / costs[-1]:>5.1f} x)" for cost in costs)
            print(f"{streams:>7}" + "".join(f"{cell:>22}" for cell in cells))
        server.terminate()


if __name__ == "__main__":
    main()
