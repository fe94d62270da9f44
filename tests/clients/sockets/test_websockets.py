"""WebSockets as clients open them, also hostile ones."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from clients.sockets.test_http_server import connected, until
from clients.sockets.test_http_server import serving as listening
from server.serving import MODEL, serving
from singletree.server.http import websocket_connection
from singletree.server.http.app import App
from singletree.server.models.config import Config

PATH = "/v1/responses"
HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def _create(prompt: str) -> str:
    return json.dumps({"type": "response.create", "model": MODEL, "input": prompt, "store": False})


async def test_turns_over_a_real_connection() -> None:
    async with (
        serving({"a": "One.", "b": "Two."}) as served,
        listening(App(served.service), websocket_limit=10_000) as (server, port),
        aiohttp.ClientSession() as session,
        session.ws_connect(f"http://127.0.0.1:{port}{PATH}") as socket,
    ):
        for prompt, text in (("x [[script:a]]", "One."), ("x [[script:b]]", "Two.")):
            await socket.send_str(_create(prompt))
            event = {"type": ""}
            while event["type"] != "response.completed":
                event = json.loads(await socket.receive_str(timeout=5))
            assert event["response"]["output"][0]["content"][0]["text"] == text  # type: ignore[index]
        await socket.send_str("{}")
        assert json.loads(await socket.receive_str(timeout=5))["type"] == "error"
        assert len(server.connections) == 1
        await socket.ping()
        await socket.close()
        await until(lambda: not server.connections)


async def test_a_message_beyond_the_limit_ends_the_connection() -> None:
    async with (
        serving({}) as served,
        listening(App(served.service), websocket_limit=10_000) as (server, port),
        aiohttp.ClientSession() as session,
        session.ws_connect(f"http://127.0.0.1:{port}{PATH}") as socket,
    ):
        await socket.send_str("x" * 10_001)
        assert (await socket.receive(timeout=5)).type is aiohttp.WSMsgType.CLOSE
        assert socket.close_code == 1009
        await until(lambda: not server.connections)


async def test_a_message_of_very_many_parts_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket_connection, "MOST_PARTS", 100)
    async with (
        serving({}) as served,
        listening(App(served.service), websocket_limit=10_000) as (server, port),
        connected(port) as client,
    ):
        client.send(HANDSHAKE)
        assert (await client.answer())[0].startswith(b"HTTP/1.1 101 ")
        client.send(b"\x01\x80mask" + b"\x00\x80mask" * 200)
        assert b"\x03\xf1too many parts" in await client.rest()
        await until(lambda: not server.connections)


async def test_a_client_that_does_not_wait_for_the_handshake_is_closed() -> None:
    async with (
        serving({}) as served,
        listening(App(served.service), websocket_limit=10_000) as (server, port),
        connected(port) as client,
    ):
        client.send(HANDSHAKE + b"\x81\x80mask")
        assert (await client.rest()).startswith(b"HTTP/1.1 400 ")
        await until(lambda: not server.connections)


async def test_a_handshake_that_is_not_allowed(caplog: pytest.LogCaptureFixture) -> None:
    async with serving({}, config=Config(api_key=("key",))) as served:
        app = App(served.service, "127.0.0.1")
        async with listening(app, websocket_limit=10_000) as (server, port):
            async with connected(port) as client:
                client.send(HANDSHAKE.replace(b"localhost", b"evil.example"))
                assert (await client.rest()).startswith(b"HTTP/1.1 403 ")
            async with connected(port) as client:
                client.send(HANDSHAKE)
                answer = await client.reader.readuntil(b"no API key")
                assert answer.startswith(b"HTTP/1.1 101 ")
            async with connected(port) as client:
                client.send(HANDSHAKE.replace(b"sec-websocket-version: 13", b"sec-websocket-version: 1"))
                assert (await client.rest()).startswith(b"HTTP/1.1 400 ")
            await until(lambda: not server.connections)
    assert not caplog.records


async def test_without_websockets_an_upgrade_is_refused_by_the_route() -> None:
    async with (
        serving({}) as served,
        listening(App(served.service)) as (_, port),
        connected(port) as client,
    ):
        client.send(HANDSHAKE)
        head, _ = await client.answer()
        assert head.startswith(b"HTTP/1.1 426 ")  # Codex goes on over HTTP at once.


async def test_the_server_ends_while_a_websocket_streams() -> None:
    async with serving() as served, aiohttp.ClientSession() as session:
        async with listening(App(served.service), websocket_limit=10_000) as (server, port):
            socket = await session.ws_connect(f"http://127.0.0.1:{port}{PATH}")
            await socket.send_str(_create("[[gen:1000:1:0.02]]"))
            await socket.receive(timeout=5)
            await asyncio.wait_for(server.close(), 5)
        await until(lambda: not served.service.tracing.running)


async def test_a_client_that_leaves_in_the_middle_is_noticed() -> None:
    async with (
        serving() as served,
        listening(App(served.service), websocket_limit=10_000) as (_, port),
        connected(port) as client,
    ):
        client.send(HANDSHAKE)
        await client.answer()
        message = _create("[[gen:1000:1:0.02]]").encode()
        client.send(b"\x81\xfe%b\0\0\0\0%b" % (len(message).to_bytes(2, "big"), message))
        await until(lambda: served.service.tracing.running)
        client.writer.transport.abort()
        await until(lambda: not served.service.tracing.running)
