"""Which HTTP server streams small chunks for the least CPU, and whether a write for each chunk is needed.

Each candidate serves in a process of its own; 1, 16 and 64 clients on loopback read chunks of the size of one
token's event. The CPU time of the server process (all threads) is divided by the number of chunks.
``direct`` writes each chunk as it comes, ``outbox`` whatever has gathered meanwhile, as the server does while a client
does not read.

    python benchmarks/http_server.py [--chunks 64000] [--pace 0.005]

``--pace`` is the seconds between the chunks of a stream; 0 is as fast as it goes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from singletree.protocols import sse
from singletree.protocols.answer import Frame
from singletree.server.answers.frame_sinks import WRITE_NOW
from singletree.server.answers.send_buffer import SendBuffer
from singletree.server.http.http_server import HttpServer

FRAME: Frame = ("", b'{"choices":[{"index":0,"delta":{"content":"word"}}]}'.ljust(217))
CHUNK = sse.encode([FRAME])
START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
STREAMS = (1, 16, 64)
PACE = "SINGLETREE_BENCHMARK_PACE"


def pace() -> float:
    """Seconds between chunks; by environment, since every candidate is a process of its own."""
    return float(os.environ.get(PACE, "0"))


async def direct(scope: Any, receive: Any, send: Any) -> None:
    """Streams as many chunks as the path says (``/20000``), one write each."""
    await receive()
    await send(dict(START))
    seconds = pace()
    for _ in range(int(scope["path"][1:])):
        await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
        await asyncio.sleep(seconds)
    await send({"type": "http.response.body", "body": b""})


async def gathered(scope: Any, receive: Any, send: Any) -> None:
    """The same, written as the server writes it."""
    await receive()
    await send(dict(START))
    box, seconds = SendBuffer(), pace()

    async def produce() -> None:
        for _ in range(int(scope["path"][1:])):
            box.put([FRAME])
            if box.is_full:
                await box.room()
            await asyncio.sleep(seconds)
        box.close()

    producing = asyncio.create_task(produce())
    while frames := await box.take():
        await send({"type": "http.response.body", "body": sse.encode(frames), "more_body": True})
    await send({"type": "http.response.body", "body": b""})
    await producing


async def at_once(scope: Any, receive: Any, send: Any) -> None:
    """The same, without a coroutine for each write: as the server writes tokens while the client reads."""
    await receive()
    await send(dict(START))
    write, seconds = scope["extensions"][WRITE_NOW], pace()
    for _ in range(int(scope["path"][1:])):
        if not write(CHUNK):
            await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
        await asyncio.sleep(seconds)
    await send({"type": "http.response.body", "body": b""})


def serve_uvicorn(port: int, app: Any, http: Any) -> None:
    """uvicorn with uvloop and the named HTTP parser."""
    import uvicorn

    uvicorn.run(
        app, port=port, http=http, loop="uvloop", lifespan="off", log_level="warning", access_log=False
    )


def serve_own(port: int, app: Any) -> None:
    """The server's own connections, on uvloop."""
    import uvloop

    async def main() -> None:
        await HttpServer(app).listen("127.0.0.1", port)
        await asyncio.Event().wait()

    uvloop.run(main())


CANDIDATES: dict[str, Callable[[int], None]] = {
    "uvicorn h11, direct": partial(serve_uvicorn, app=direct, http="h11"),
    "uvicorn httptools, direct": partial(serve_uvicorn, app=direct, http="httptools"),
    "uvicorn httptools, outbox": partial(serve_uvicorn, app=gathered, http="httptools"),
    "own, direct": partial(serve_own, app=direct),
    "own, outbox": partial(serve_own, app=gathered),
    "own, at once": partial(serve_own, app=at_once),
}


def cpu_seconds(pid: int) -> float:
    """Time on a processor of all threads of a process and its children, from /proc (nanosecond clock)."""
    total = 0
    for child in (pid, *children(pid)):
        for thread in os.listdir(f"/proc/{child}/task"):
            with open(f"/proc/{child}/task/{thread}/schedstat", encoding="ascii") as file:
                total += int(file.read().split()[0])
    return total / 1e9


def children(pid: int) -> list[int]:
    """The processes that ``pid`` started."""
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        direct = [int(word) for word in file.read().split()]
    return direct + [grandchild for child in direct for grandchild in children(child)]


async def drain(port: int, chunks: int) -> None:
    """One client: asks for ``chunks`` chunks and reads to the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(f"GET /{chunks} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    seen = 0
    while data := await reader.read(1 << 18):
        seen += data.count(b"data: ")
    assert seen >= chunks * 0.999, seen
    writer.close()


async def wait_open(port: int) -> None:
    """Until somebody listens on ``port``."""
    for _ in range(200):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return
    raise SystemExit(f"nothing listens on {port}")


async def measure(port: int, pid: int, chunks: int) -> list[tuple[float, float]]:
    """(µs of server CPU a chunk, thousand chunks a second) for each number of streams."""
    await wait_open(port)
    await drain(port, 1000)
    rows = []
    for streams in STREAMS:
        cpu, wall = cpu_seconds(pid), time.perf_counter()
        await asyncio.gather(*(drain(port, chunks // streams) for _ in range(streams)))
        wall = time.perf_counter() - wall
        rows.append(((cpu_seconds(pid) - cpu) / chunks * 1e6, chunks / wall / 1e3))
    return rows


def measured(name: str, chunks: int) -> list[tuple[float, float]]:
    """``measure`` of a candidate in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, __file__, "--serve", name, "--port", str(port)])
    try:
        return asyncio.run(measure(port, process.pid, chunks))
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Measure all, or serve one."""
    options = argparse.ArgumentParser()
    options.add_argument("--chunks", type=int, default=64_000)
    options.add_argument("--pace", type=float, default=0.0)
    options.add_argument("--serve")
    options.add_argument("--port", type=int)
    given = options.parse_args()
    if given.serve:
        CANDIDATES[given.serve](given.port)
        return
    os.environ[PACE] = str(given.pace)
    baseline: list[tuple[float, float]] = []
    print(f"{'CPU µs a chunk (k chunks/s, ratio)':36}" + "".join(f"{n:>4} streams        " for n in STREAMS))
    for name in CANDIDATES:
        rows = measured(name, given.chunks)
        baseline = baseline or rows
        cells = "".join(
            f"{us:6.1f} ({rate:4.0f}, {us / base:4.2f})   "
            for (us, rate), (base, _) in zip(rows, baseline, strict=True)
        )
        print(f"{name:36}{cells}", flush=True)


if __name__ == "__main__":
    main()
