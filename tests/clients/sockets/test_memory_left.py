"""What a request leaves: its memory is free when it ends, without a run of the collector."""

from __future__ import annotations

import asyncio
import gc
import json

import pytest

from clients.sockets.test_http_server import connected
from clients.sockets.test_http_server import serving as listening
from server.serving import body, serving
from singletree.server.http.app import App

PATH = "/v1/messages"
PARSER = 30
"""Objects of a parser, which refers to itself."""
LOOP = 20
"""Objects that a connection of asyncio's own loop leaves."""

STREAM = json.dumps(body(PATH, "x [[script:a]]", stream=True)).encode()
BODY = json.dumps(body(PATH, "x [[script:a]]")).encode()
ENDLESS = "x [[gen:5000:1:0.01]]"


@pytest.mark.parametrize(
    ("content", "leaves", "left"),
    [
        (STREAM, False, PARSER),
        (BODY, False, PARSER),
        (json.dumps(body(PATH, ENDLESS, stream=True)).encode(), True, PARSER),
        (json.dumps(body(PATH, ENDLESS)).encode(), True, PARSER),
        (b"{", False, 0),
        (json.dumps(body(PATH, "x" * 20_000)).encode(), False, 0),
        (json.dumps(body(PATH, "x" * 200_000)).encode(), False, 0),
    ],
)
async def test_a_request_leaves_no_cycles(content: bytes, leaves: bool, left: int) -> None:
    async with serving({"a": "Hi."}) as served, listening(App(served.service)) as (_, port):

        async def ask() -> None:
            async with connected(port) as client:
                client.send(b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n")
                client.send(b"content-length: %d\r\n\r\n%b" % (len(content), content))
                if leaves:
                    await asyncio.sleep(0.05)
                    client.writer.transport.abort()
                else:
                    await client.rest()
            await asyncio.sleep(0.05)

        for _ in range(2):
            await ask()
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                await ask()
            assert gc.collect() <= 3 * (left + LOOP)
        finally:
            gc.enable()
