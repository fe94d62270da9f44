"""Request bodies: read to a limit, and decompressed to the same limit.

Codex compresses with zstd when it is signed in to ChatGPT; proxies and SDKs with gzip or Brotli. What is compressed is
expanded piece by piece, so that a small body that would grow past the limit is refused once it has.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from io import BytesIO

import brotli
import zstandard
from starlette.types import Message, Receive

from singletree.errors import BodyTooLarge, InvalidRequest, UnsupportedEncoding

_LARGEST_WINDOW = 128 * 2**20
"""Memory that one zstd frame may ask for, in bytes: the limit that zstd's own command has."""


_PIECE = 2**16
"""How much is decompressed at a time, in bytes; of Brotli, about how much comes out."""
_MOST_MEMBERS = 10_000
"""Members of a gzip body: each costs the copy of a piece, and empty ones are 20 bytes."""


class ClientLeft(Exception):
    """The client hung up; nobody reads what comes now."""


async def read_body(headers: Mapping[str, str], receive: Receive, limit: int) -> bytes:
    """The body of a request, decompressed.

    Args:
        headers: names in lower case.
        limit: most bytes, before and after decompression.

    Raises:
        BodyTooLarge, UnsupportedEncoding, InvalidRequest (damaged compression), ClientLeft.
    """
    steps = [_decoder(name) for name in _encodings(headers)]
    body = await _receive_all(receive, limit)
    for decompress in reversed(steps):
        body = decompress(body, limit) if body else b""
    return body


async def _receive_all(receive: Receive, limit: int) -> bytes:
    """All of it, or BodyTooLarge once it is known to be too much.

    What is over the limit is read and dropped up to the same amount again: a client that is still writing
    sees no answer, only a broken connection.
    """
    pieces: list[bytes] = []
    size = 0
    more = True
    while more and size <= 2 * limit:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        piece = message.get("body", b"")
        size += len(piece)
        if size <= limit:
            pieces.append(piece)
        more = message.get("more_body", False)
    if size > limit:
        raise _too_large(limit)
    return b"".join(pieces)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is larger than {limit} bytes; send less, or raise --body-limit")


def _encodings(headers: Mapping[str, str]) -> list[str]:
    given = headers.get("content-encoding", "").lower().split(",")
    return [name for word in given if (name := word.strip()) not in ("", "identity")]


def _gunzip(body: bytes, limit: int) -> bytes:
    view, at, out = memoryview(body), 0, bytearray()
    for _ in range(_MOST_MEMBERS):
        member = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        while at < len(view) and not member.eof:
            piece = view[at : at + _PIECE]
            try:
                out += member.decompress(piece, limit - len(out) + 1)
            except zlib.error:
                raise _damaged("gzip") from None
            if len(out) > limit:
                raise _too_large(limit)
            at += len(piece) - len(member.unused_data)
        if at == len(view):
            break
    if at < len(view) or not member.eof:
        raise _damaged("gzip")
    return bytes(out)


def _unzstd(body: bytes, limit: int) -> bytes:
    decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
    try:
        with decompressor.stream_reader(BytesIO(body), read_across_frames=True) as reader:
            out = reader.read(limit + 1)
    except zstandard.ZstdError:
        raise _damaged("zstd") from None
    if len(out) > limit:
        raise _too_large(limit)
    return out


def _unbrotli(body: bytes, limit: int) -> bytes:
    decompressor, out = brotli.Decompressor(), bytearray()
    try:
        out += decompressor.process(body, output_buffer_limit=_PIECE)
        while not decompressor.is_finished() and len(out) <= limit:
            piece = decompressor.process(b"", output_buffer_limit=_PIECE)
            if not piece:
                raise _damaged("br")
            out += piece
    except brotli.error:
        raise _damaged("br") from None
    if len(out) > limit:
        raise _too_large(limit)
    return bytes(out)


def _damaged(encoding: str) -> InvalidRequest:
    return InvalidRequest(
        f"the request body is not valid {encoding}; send it whole, or without Content-Encoding"
    )


_DECODERS: dict[str, Callable[[bytes, int], bytes]] = {
    "gzip": _gunzip,
    "x-gzip": _gunzip,
    "zstd": _unzstd,
    "br": _unbrotli,
}


def _decoder(name: str) -> Callable[[bytes, int], bytes]:
    if name not in _DECODERS:
        known = ", ".join(_DECODERS)
        raise UnsupportedEncoding(
            f"Content-Encoding {name[:32]!a} is not supported; send one of {known}, or the plain body"
        )
    return _DECODERS[name]
