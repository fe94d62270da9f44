"""Fetch pictures and documents that a client names by URL, from public addresses only."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from urllib.parse import urljoin, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from singletree.server.pictures.check import UnusablePicture

_SECONDS = 20.0
_REDIRECTS = 3


def is_public(address: str) -> bool:
    """Return whether an IP address is of the public internet: not of this machine, its network, or a reserved range."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    inner = _embedded(found) if isinstance(found, ipaddress.IPv6Address) else []
    addresses: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = [found, *inner]
    return all(each.is_global and not each.is_multicast for each in addresses)


def _embedded(found: ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    """Return the IPv4 addresses to which gateways forward what is sent to ``found``."""
    inner = [found.ipv4_mapped, found.sixtofour, *(found.teredo or ())]
    if int(found) >> 32 in _LAST_BITS_ARE_IPV4:
        inner.append(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF))
    return [each for each in inner if each is not None]


_LAST_BITS_ARE_IPV4 = (0, int(ipaddress.IPv6Address("64:ff9b::")) >> 32)
"""The first 96 bits of IPv4-compatible addresses and of NAT64."""


class _PublicResolver(AbstractResolver):
    """Resolves host names to public addresses alone. The connection uses these very addresses: no second look-up of
    the name can give another one (DNS rebinding)."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, family=socket.AF_UNSPEC)
        public = [(kind, str(where[0])) for kind, _, _, _, where in found if is_public(str(where[0]))]
        if len(public) < len(found) or not public:
            raise UnusablePicture(f"{host} is not a public address")
        return [
            ResolveResult(
                hostname=host, host=address, port=port, family=kind, proto=0, flags=socket.AI_NUMERICHOST
            )
            for kind, address in public
        ]

    async def close(self) -> None:
        """Do nothing: nothing is open."""


async def download(url: str, limit: int) -> bytes:
    """Return the content of ``url``, at most ``limit`` bytes.

    Raises:
        UnusablePicture: the URL is not http(s) or not public, or it cannot be fetched.
    """
    try:
        async with asyncio.timeout(_SECONDS):
            connector = aiohttp.TCPConnector(
                resolver=_PublicResolver(), use_dns_cache=False, force_close=True
            )
            # Without cookies and without the proxies of the environment, which would resolve names themselves.
            async with aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                auto_decompress=False,  # a small body could become a large one
                headers={"Accept-Encoding": "identity"},
            ) as session:
                return await _follow(session, url, limit)
    except UnusablePicture:
        raise
    except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
        cause = error.__cause__ or error.__context__
        if isinstance(cause, UnusablePicture):
            raise cause from None
        raise UnusablePicture(f"it cannot be fetched ({type(error).__name__})") from None


async def _follow(session: aiohttp.ClientSession, url: str, limit: int) -> bytes:
    for _ in range(_REDIRECTS + 1):
        _check_url(url)
        async with session.get(url, allow_redirects=False) as response:
            if response.status in (301, 302, 303, 307, 308) and "location" in response.headers:
                url = urljoin(url, response.headers["location"])
                continue
            if response.status != 200:
                raise UnusablePicture(f"its server answered with status {response.status}")
            return await _read(response, limit)
    raise UnusablePicture(f"it redirects more than {_REDIRECTS} times")


def _check_url(url: str) -> None:
    """Raise UnusablePicture for another scheme, and for an address that is written as a number and not public."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise UnusablePicture("only http and https URLs without a user name are fetched")
    try:
        ipaddress.ip_address(parts.hostname)
    except ValueError:
        return  # a name, which the resolver checks
    if not is_public(parts.hostname):  # aiohttp does not resolve numbers
        raise UnusablePicture(f"{parts.hostname} is not a public address")


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    data = bytearray()
    async for piece in response.content.iter_chunked(2**16):
        data += piece
        if len(data) > limit:
            raise UnusablePicture(
                f"it has more than {limit} bytes; send a smaller one, or raise --picture-limit"
            )
    return bytes(data)
