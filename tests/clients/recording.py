"""What a client sent through a relay: each request over HTTP, each message over a WebSocket."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import zstandard

from clients.relay import Relay

_END_OF_HEADERS = b"\r\n\r\n"
_TEXT, _CLOSE = 1, 8


class Sent(NamedTuple):
    """One request, or one message of a WebSocket, whose ``method`` is ``WS``. ``headers`` have lower-case names.

    ``size`` is that of its body on the wire, in bytes.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    size: int

    @property
    def json(self) -> Any:
        """The body as a JSON value."""
        return json.loads(self.body)


def sent_through(relay: Relay) -> list[Sent]:
    """All that clients sent so far, that of one connection after that of another."""
    return [sent for asked in relay.asked for sent in _requests(bytes(asked))]


def _requests(data: bytes) -> Iterator[Sent]:
    """The whole requests in the bytes of a connection."""
    while _END_OF_HEADERS in data:
        head, _, data = data.partition(_END_OF_HEADERS)
        first, *lines = head.decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ", 2)
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("upgrade", "").lower() == "websocket":
            yield Sent(method, path, headers, b"", 0)
            yield from (Sent("WS", path, headers, message, size) for message, size in _messages(data))
            return
        size = int(headers.get("content-length", 0))
        if len(data) < size:
            return
        yield Sent(method, path, headers, _plain(data[:size], headers), size)
        data = data[size:]


def _plain(body: bytes, headers: dict[str, str]) -> bytes:
    if headers.get("content-encoding") == "zstd":
        return zstandard.ZstdDecompressor().decompressobj().decompress(body)
    return body


def _messages(data: bytes) -> Iterator[tuple[bytes, int]]:
    """The text messages that a client sent (RFC 6455, and RFC 7692 where they are compressed), and their sizes."""
    inflate = zlib.decompressobj(-zlib.MAX_WBITS)
    message, compressed = b"", False
    while len(data) >= 6:
        first, length, at = data[0], data[1] & 0x7F, 2
        if length >= 126:
            at += 2 if length == 126 else 8
            length = int.from_bytes(data[2:at], "big")
        if len(data) < at + 4 + length:
            return
        mask, payload, data = data[at : at + 4], data[at + 4 : at + 4 + length], data[at + 4 + length :]
        opcode = first & 0x0F
        if opcode >= _CLOSE:
            continue
        message = _unmasked(payload, mask) if opcode else message + _unmasked(payload, mask)
        compressed = bool(first & 0x40) if opcode == _TEXT else compressed
        if first & 0x80:
            plain = inflate.decompress(message + b"\0\0\xff\xff") if compressed else message
            yield plain, len(message)


def _unmasked(payload: bytes, mask: bytes) -> bytes:
    key = (mask * (len(payload) // 4 + 1))[: len(payload)]
    return (int.from_bytes(payload, "big") ^ int.from_bytes(key, "big")).to_bytes(len(payload), "big")
