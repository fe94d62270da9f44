"""WebSockets as clients open them, also hostile ones."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from clients.sockets.test_http_server import connected, until
from clients.sockets.test_http_server import serving as listening
from server.serving import MODEL, serving
from singletree.server.http.app import App
from singletree.server.settings.config import Config
from singletree.websockets import connection as websocket_connection

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


async def test_pings_of_a_client_that_does_not_read_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket_connection, "MOST_CONTROL_FRAMES", 10_000)
    async with (
        serving({}) as served,
        listening(App(served.service), websocket_limit=10_000) as (server, port),
        connected(port) as client,
    ):
        client.send(HANDSHAKE)
        assert (await client.answer())[0].startswith(b"HTTP/1.1 101 ")
        [protocol] = server.connections
        protocol.pause_writing()
        for _ in range(100):
            client.send((b"\x89\xfdmask" + b"x" * 125) * 100)
            await asyncio.sleep(0.001)
        await until(lambda: not protocol.conn.reader.buffer)
        assert protocol.transport.get_write_buffer_size() == 0
        protocol.resume_writing()
        client.send(b"\x89\x80mask")
        assert await client.reader.readexactly(2) == b"\x8a\x00"


@pytest.mark.parametrize("frame", [b"\x89\x80mask", b"\x8a\x80mask"])
async def test_many_pings_in_a_second_end_the_connection(frame: bytes) -> None:
    async with (
        serving({}) as served,
        listening(App(served.service), websocket_limit=10_000) as (server, port),
        connected(port) as client,
    ):
        client.send(HANDSHAKE)
        assert (await client.answer())[0].startswith(b"HTTP/1.1 101 ")
        [protocol] = server.connections
        client.send(frame * websocket_connection.MOST_CONTROL_FRAMES)
        await until(lambda: protocol._control_frames == websocket_connection.MOST_CONTROL_FRAMES)
        protocol.check_time(0.0)
        client.send(frame * 2000)
        assert b"\x03\xf0too many pings" in await client.rest()
        assert protocol._control_frames < 1000
        await until(lambda: not server.connections)


async def test_messages_that_arrive_or_wait_are_bounded_together(set_limits: Callable[..., None]) -> None:
    set_limits(bytes_in_preparation=100_000)
    async with serving() as served:
        admission = served.service.admission
        app = App(served.service)
        async with (
            listening(app, websocket_limit=10**6, admission=admission) as (server, port),
            aiohttp.ClientSession() as session,
            session.ws_connect(f"http://127.0.0.1:{port}{PATH}") as busy,
            connected(port) as client,
        ):
            await busy.send_str(_create("[[gen:1000:1:0.02]]"))
            await busy.receive(timeout=5)
            await busy.send_str(_create("x" * 60_000))  # waits, and is the smaller one
            await until(lambda: admission.arriving > 60_000)
            client.send(HANDSHAKE)
            assert (await client.answer())[0].startswith(b"HTTP/1.1 101 ")
            client.send(b"\x81\xff" + (500_000).to_bytes(8, "big") + b"mask" + b"x" * 90_000)
            await until(lambda: len(server.connections) == 1)
            assert 60_000 < admission.arriving < 61_000
        await until(lambda: not server.connections and not admission.arriving)


async def test_a_message_that_was_dropped_while_it_waited_is_refused(set_limits: Callable[..., None]) -> None:
    set_limits(bytes_in_preparation=100_000)
    async with (
        serving() as served,
        listening(App(served.service), websocket_limit=10**6) as (_, port),
        aiohttp.ClientSession() as session,
        session.ws_connect(f"http://127.0.0.1:{port}{PATH}") as socket,
    ):
        await socket.send_str(_create("[[gen:20:1:0.02]]"))
        await socket.receive(timeout=5)
        await socket.send_str(_create("x" * 90_000))
        await socket.send_str(_create("x" * 80_000))
        events = []
        while "error" not in events:
            event = json.loads(await socket.receive_str(timeout=5))
            events.append(event["type"])
        assert event["status"] == 503
        assert "response.completed" in events
        assert "--limit bytes_in_preparation" in event["error"]["message"]


async def test_an_answered_message_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        serving({"a": "One."}) as served,
        listening(App(served.service), websocket_limit=10**6) as (_, port),
        aiohttp.ClientSession() as session,
        session.ws_connect(f"http://127.0.0.1:{port}{PATH}") as socket,
    ):
        await socket.send_str(_create("x [[script:a]]")[:-1] + ', "ignored": "%s"}' % ("y" * 500_000))
        event = {"type": ""}
        while event["type"] != "response.completed":
            event = json.loads(await socket.receive_str(timeout=5))
        del event
        gc.collect()
        assert not [each for each in _texts() if "y" * 1000 in each]


def _texts() -> list[str]:
    """Return the long texts that frames of waiting coroutines refer to."""
    found: list[str] = []
    for task in asyncio.all_tasks():
        coroutine: Any = task.get_coro()
        while coroutine is not None and hasattr(coroutine, "cr_frame"):
            values = [] if coroutine.cr_frame is None else [*coroutine.cr_frame.f_locals.values()]
            values += [each.get("text") for each in values if isinstance(each, dict)]
            found += [str(each) for each in values if isinstance(each, str | bytes) and len(each) > 1000]
            coroutine = coroutine.cr_await
    return found
