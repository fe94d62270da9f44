"""Read request bodies up to a limit, and decompress them up to the same limit.

Codex compresses with zstd when it is signed in to ChatGPT; proxies and SDKs compress with gzip or Brotli. A body is
decompressed piece by piece, so that a small body that expands beyond the limit is refused as soon as it exceeds it.
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
"""Most memory for one zstd frame, in bytes: the limit of zstd's own command."""

_PIECE = 2**16
"""How many compressed bytes are decompressed at a time; for Brotli, about how many bytes of output."""
_MOST_MEMBERS = 10_000
"""Most members of a gzip body: each costs the copy of a piece, and an empty member has only 20 bytes."""


class ClientLeft(Exception):
    """The client disconnected; nobody reads the answer."""


async def read_body(headers: Mapping[str, str], receive: Receive, limit: int) -> bytes:
    """Read the body of a request and decompress it.

    Args:
        headers: the request's headers, names in lower case.
        receive: the ASGI channel of the connection.
        limit: most bytes, before and after decompression.

    Raises:
        BodyTooLarge: the body is larger than ``limit``.
        UnsupportedEncoding: the Content-Encoding is not known.
        InvalidRequest: the compressed data is damaged.
        ClientLeft: the client disconnected.
    """
    steps = [_decoder(name) for name in _encodings(headers)]
    body = await _receive_all(receive, limit)
    for decompress in reversed(steps):
        body = decompress(body, limit) if body else b""
    return body


async def _receive_all(receive: Receive, limit: int) -> bytes:
    """Return the whole body. Raises BodyTooLarge when it exceeds ``limit``.

    Bytes beyond the limit are read and dropped, up to the same amount again: a client that is still writing
    would not see the answer, only a broken connection.
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
    given = headers.get("content-encoding")
    if given is None:
        return []
    return [name for word in given.lower().split(",") if (name := word.strip()) not in ("", "identity")]


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
        f"the request body is not valid {encoding}; send complete data, or leave out Content-Encoding"
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
