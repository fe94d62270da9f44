"""Pictures by URL from real servers on loopback, of which one stands for the public internet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from singletree.media import check as pictures
from singletree.media.check import NOT_FETCHED, UnusablePicture, download
from singletree.remote.http_client import Addresses

PUBLIC = "127.0.0.2"
"""An address of loopback that is taken for a public one."""


class Site:
    """Answers every request with ``answer``, and keeps the requests."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.connections = 0
        self.requests: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            self.requests.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(self.answer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def _ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)


def _to(url: str) -> bytes:
    return b"HTTP/1.1 302 Found\r\nlocation: %b\r\ncontent-length: 0\r\n\r\n" % url.encode()


@asynccontextmanager
async def listening(site: Site, host: str) -> AsyncIterator[int]:
    """Serve ``site``; yield the port."""
    server = await asyncio.start_server(site, host, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@pytest.fixture(autouse=True)
def _one_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "is_public", lambda address: address == PUBLIC)


async def test_a_public_server_is_fetched_from() -> None:
    site = Site(_ok(b"picture"))
    async with listening(site, PUBLIC) as port:
        assert await download(f"http://{PUBLIC}:{port}/a.png", 100) == b"picture"
        with pytest.raises(UnusablePicture, match="more than 3 bytes"):
            await download(f"http://{PUBLIC}:{port}/a.png", 3)


class _Hops(Site):
    """Redirects so many requests, and answers the next."""

    def __init__(self, *locations: str) -> None:
        super().__init__(b"")
        self.answers = [*map(_to, locations), _ok(b"picture")]

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.answer = self.answers[self.connections]
        await super().__call__(reader, writer)


async def test_redirections_between_public_servers_are_followed() -> None:
    site = _Hops("b.png?size=1#top", "/c", "?size=2")
    async with listening(site, PUBLIC) as port:
        assert await download(f"http://{PUBLIC}:{port}/a/x.png#y", 100) == b"picture"
        paths = [request.split(b" ", 2)[1] for request in site.requests]
        assert paths == [b"/a/x.png", b"/a/b.png?size=1", b"/c", b"/c?size=2"]
    site = _Hops(*"abcd")
    async with listening(site, PUBLIC) as port:
        with pytest.raises(UnusablePicture, match="cannot be fetched"):
            await download(f"http://{PUBLIC}:{port}/", 100)
        assert site.connections == 4


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "１２７.0.0.1", "①②⑦.0.0.1", "127。0.0.1", "localhost", "2130706433", "127.1", "0x7f.1"],
)
async def test_a_redirection_to_this_machine_is_not_followed(host: str) -> None:
    inner, outer = Site(_ok(b"secret")), Site(b"")
    async with listening(inner, "127.0.0.1") as inside, listening(outer, PUBLIC) as port:
        outer.answer = _to(f"http://{host}:{inside}/")
        for url in (f"http://{host}:{inside}/", f"http://{PUBLIC}:{port}/"):
            with pytest.raises(UnusablePicture) as refused:
                await download(url, 100)
            assert str(refused.value) == NOT_FETCHED
    assert (inner.connections, outer.connections) == (0, 1)


async def test_where_no_check_before_it_holds_the_other_end_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pictures, "_checked", urlsplit)
    monkeypatch.setattr(pictures._PublicAddresses, "resolve", Addresses.resolve)
    site = Site(_ok(b"secret"))
    async with listening(site, "127.0.0.1") as port:
        with pytest.raises(UnusablePicture):
            await download(f"http://127.0.0.1:{port}/", 100)
    assert site.connections == 1
    assert not site.requests


async def test_a_failing_server_a_closed_port_and_a_private_one_are_reported_alike() -> None:
    texts = set()
    for answer in (b"HTTP/1.1 404 Gone\r\n\r\n", b"HTTP/1.1 500 No\r\n\r\n", b"SSH-2.0\r\n", b"", _to("/")):
        async with listening(Site(answer), PUBLIC) as port:
            with pytest.raises(UnusablePicture) as refused:
                await download(f"http://{PUBLIC}:{port}/", 100)
            texts.add(str(refused.value))
    for host in (PUBLIC, "127.0.0.1"):
        with pytest.raises(UnusablePicture) as refused:
            await download(f"http://{host}:{port}/", 100)
        texts.add(str(refused.value))
    assert texts == {NOT_FETCHED}
