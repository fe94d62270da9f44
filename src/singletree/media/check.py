"""Check the bytes of a picture before an engine decodes them: format, size in bytes, size in pixels, damage.

Fetch pictures and documents that a client names by URL, from public addresses only.

What is checked is what is connected to: the HTTP client gets the addresses, and no second look-up of a name can give
another one (DNS rebinding). The check is made three times: of a host that is an address, of what a name resolves to,
and of the other end of the connection before a request is sent. There are no cookies, and no proxy, which would resolve
names itself.

All failures have one text. If a client could tell a refused address from a name that is unknown, a closed port or an
answer's status, then it could use the server to look into the server's network.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
from typing import TYPE_CHECKING

from singletree.pictures import Picture

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage
import asyncio
import ipaddress
import logging
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from urllib.parse import SplitResult, urljoin, urlsplit

from singletree.remote.http_client import Addresses, HttpTransport, MakeConnection
from singletree.remote.http_connection import HttpConnection
from singletree.remote.transport import ConnectionLost, Redirected, read_answer

FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "GIF": "image/gif", "WEBP": "image/webp"}
"""The formats that harnesses send, by Pillow's names, with their media types."""

UNUSUAL = "image/x-unusual"
"""Media type of a picture with an uncommon colour model (CMYK, 16 bits): no engine declares it, so it is converted."""

MAX_PIXELS = 2**26
"""The most pixels of a picture: 8192 by 8192. A file of a few kilobytes can hold more (a decompression bomb)."""

MAX_RATIO = 200
"""The largest ratio of a picture's sides: the processors of Qwen's models fail from there on."""

_COMMON_MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA"})
_WHITE_SPACE = re.compile(r"\s+")


class UnusablePicture(Exception):
    """A picture or document cannot be used; the text says why, and what to send instead."""


def decode_base64(data: str, limit: int) -> bytes:
    """Return the bytes of ``data``. Raises UnusablePicture if it is not base64, or more than ``limit`` bytes."""
    if len(data) * 3 // 4 > limit + 2:
        data = _WHITE_SPACE.sub("", data)
    if len(data) * 3 // 4 > limit + 2:
        raise UnusablePicture(f"it has more than {limit} bytes; send a smaller one, or raise --picture-limit")
    try:
        try:
            decoded = binascii.a2b_base64(data, strict_mode=True)
        except binascii.Error:
            compact = _WHITE_SPACE.sub("", data)
            others = b"-_" if "-" in compact or "_" in compact else None
            decoded = base64.b64decode(compact + "=" * (-len(compact) % 4), others, validate=True)
    except ValueError:  # also for characters that are not ASCII
        raise UnusablePicture("its data is not base64") from None
    if len(decoded) > limit:
        raise UnusablePicture(f"it has more than {limit} bytes; send a smaller one, or raise --picture-limit")
    return decoded


def picture_key(data: bytes) -> str:
    """Return the key of a picture: the SHA-256 hash of its bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def check_picture(data: bytes, key: str) -> Picture:
    """Return the picture with ``data`` and its ``picture_key``, once it was decoded.

    Raises:
        UnusablePicture: it has another format, too many pixels, or is damaged.
    """
    with opened(data) as image:
        try:
            image.load()
        except Exception as error:  # a decoder of foreign data, which fails in many ways
            raise UnusablePicture(f"its {image.format} data is damaged ({_reason(error)})") from None
        media_type = FORMATS[str(image.format)] if image.mode in _COMMON_MODES else UNUSUAL
        return Picture(key, media_type, data)


def convert_picture(picture: Picture) -> Picture:
    """Return ``picture`` as PNG, under the key of the bytes that the client sent. Raises UnusablePicture."""
    with opened(picture.data) as image:
        target = io.BytesIO()
        try:
            image.convert("RGBA" if "A" in image.getbands() else "RGB").save(target, "PNG", compress_level=1)
        except Exception as error:
            raise UnusablePicture(f"its {image.format} data is damaged ({_reason(error)})") from None
    return Picture(picture.key, "image/png", target.getvalue())


def opened(data: bytes) -> PillowImage:
    """Read the header of a picture. Raises UnusablePicture for another format and for too many pixels."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data), formats=tuple(FORMATS))
    except UnidentifiedImageError:
        raise UnusablePicture("it is neither PNG, JPEG, GIF nor WebP; send one of these") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise UnusablePicture(_too_large("more")) from None
    except Exception as error:
        raise UnusablePicture(f"its header is damaged ({_reason(error)})") from None
    width, height = image.size
    if width * height > MAX_PIXELS or width < 1 or height < 1:
        raise UnusablePicture(_too_large(f"{width} x {height}"))
    if max(width, height) > MAX_RATIO * min(width, height):
        raise UnusablePicture(f"one of its sides is more than {MAX_RATIO} times as long as the other; cut it")
    return image


def _too_large(size: str) -> str:
    return f"it has {size} pixels, of which at most {MAX_PIXELS} are accepted; send a smaller one"


def _reason(error: Exception) -> str:
    return str(error)[:80] or type(error).__name__


LOG = logging.getLogger(__name__)

NOT_FETCHED = (
    "its URL cannot be fetched: only http and https URLs without a user name are, if their server is on the public "
    "internet and answers with status 200 in time; send the data instead"
)
"""The text of every failure but that of the size."""

_SECONDS = 20.0
_REDIRECTS = 3
_MAX_URL_LENGTH = 8192


class _NotFetched(ValueError):
    """The URL is not fetched; the text is for the server's log alone."""


class _PublicAddresses(Addresses):
    """The addresses of a host if all are public, and connections whose other end is."""

    async def resolve(self) -> Sequence[str]:
        found = await super().resolve()
        if not all(map(is_public, found)):
            raise _NotFetched("not a public address")
        return found

    async def connect_to(self, address: str, make: MakeConnection) -> HttpConnection:
        connection = await super().connect_to(address, make)
        peer, own = connection.ends
        if not is_public(peer) or peer == own:
            connection.drop()
            raise _NotFetched("connected to an address that is not public, or to this machine")
        return connection


async def download(url: str, limit: int) -> bytes:
    """Return the content of ``url``, at most ``limit`` bytes.

    Raises:
        UnusablePicture: the URL is not http(s) or not public, it cannot be fetched, or it has more bytes.
    """
    try:
        async with asyncio.timeout(_SECONDS):
            return await _follow(url, limit)
    except (ConnectionLost, OSError, ValueError) as error:
        why = error.__cause__ or error
        LOG.debug("a URL of a request is not fetched: %s %s", type(why).__name__, ascii(str(why))[:200])
        raise UnusablePicture(NOT_FETCHED) from None


async def _follow(url: str, limit: int) -> bytes:
    for _ in range(_REDIRECTS + 1):
        parts = _checked(url)
        try:
            return await _fetch(parts, limit)
        except Redirected as found:
            if found.status not in (301, 302, 303, 307, 308):
                raise _NotFetched(f"status {found.status}") from None
            url = urljoin(url, found.location)
            if parts.scheme == "https" and urlsplit(url).scheme != "https":
                raise _NotFetched("a redirection from https to http") from None
    raise _NotFetched(f"more than {_REDIRECTS} redirections")


def _checked(url: str) -> SplitResult:
    """Return the parts of ``url``.

    Raises _NotFetched for another scheme, and for an address that is written as a number and not public; ValueError for
    what is no URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _NotFetched("no http or https URL")
    if parts.username is not None:
        raise _NotFetched("a URL with a user name")
    if len(url) > _MAX_URL_LENGTH:
        raise _NotFetched("a URL that is too long")
    try:
        ipaddress.ip_address(parts.hostname)
    except ValueError:
        return parts  # a name, which is checked when it is resolved
    if not is_public(parts.hostname):
        raise _NotFetched("not a public address")
    return parts


async def _fetch(url: SplitResult, limit: int) -> bytes:
    root = f"{url.scheme}://{url.netloc}"
    transport = HttpTransport(root, connect=_PublicAddresses(root).connect, keep_alive=False)
    await transport.open()
    try:
        response = transport.stream((url.path or "/") + (f"?{url.query}" if url.query else ""))
        await response.begin()
        if response.status != 200:
            raise _NotFetched(f"status {response.status}")
        data = await read_answer(response, limit + 1)
    finally:
        await transport.close()
    if len(data) > limit:
        raise UnusablePicture(f"it has more than {limit} bytes; send a smaller one, or raise --picture-limit")
    return data


_NOT_PUBLIC_4 = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",  # this host
            "10.0.0.0/8",
            "100.64.0.0/10",  # networks of providers; a cloud keeps its metadata there
            "127.0.0.0/8",
            "168.63.129.16/32",  # the host of a virtual machine on Azure
            "169.254.0.0/16",  # link-local; clouds keep their metadata there
            "172.16.0.0/12",
            "192.0.0.0/24",
            "192.0.2.0/24",
            "192.88.99.0/24",  # relays of 6to4
            "192.168.0.0/16",
            "198.18.0.0/15",  # tests of network devices
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/3",  # multicast, reserved, broadcast
        ),
    )
)

_PUBLIC_6 = IPv6Network("2000::/3")
"""The only range from which IANA gives addresses to networks of the internet."""

_NOT_PUBLIC_6 = tuple(
    map(
        IPv6Network,
        (
            "2001::/23",  # protocols: Teredo, benchmarks, ORCHID
            "2001:db8::/32",
            "2002::/16",  # 6to4
            "3ffe::/16",  # given back
            "3fff::/20",
        ),
    )
)

_IPV4_IN_LAST_BITS = tuple(map(IPv6Network, ("::ffff:0:0/96", "64:ff9b::/96")))
"""IPv4 addresses as a socket names them (mapped), and as a network without IPv4 reaches them (NAT64)."""

_ISATAP = (0x00005EFE, 0x02005EFE)
"""Bits 64 to 95 of an address whose last 32 bits are that of a host behind an IPv4 tunnel of its site (RFC 5214)."""


def is_public(address: str) -> bool:
    """Return whether an IP address is of the public internet; False for text that is no address."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return all(map(_is_listed, _reached(found)))


def _is_listed(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_4)
    return address in _PUBLIC_6 and not any(address in network for network in _NOT_PUBLIC_6)


def _reached(address: IPv4Address | IPv6Address) -> Iterator[IPv4Address | IPv6Address]:
    if isinstance(address, IPv6Address):
        last = IPv4Address(int(address) & 0xFFFFFFFF)
        if any(address in network for network in _IPV4_IN_LAST_BITS):
            yield last
            return
        if int(address) >> 32 & 0xFFFFFFFF in _ISATAP:
            yield last
    yield address
