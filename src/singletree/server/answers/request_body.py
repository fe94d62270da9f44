"""Read request bodies up to a limit, decompress them up to the same limit, and bound what all of them hold together.

Codex compresses with zstd when it is signed in to ChatGPT; proxies and SDKs compress with gzip or Brotli. A body is
decompressed piece by piece, so that a small body that expands beyond the limit is refused as soon as it exceeds it.
Only one encoding is accepted: no client sends more, and each could expand the one before it.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import BytesIO

import brotli
import zstandard
from starlette.types import Receive

from singletree import request_limits
from singletree.errors import BodyTooLarge, InvalidRequest, Overloaded, UnsupportedEncoding

_LARGEST_WINDOW = 128 * 2**20
"""Most memory for one zstd frame, in bytes: the limit of zstd's own command."""

_PIECE = 2**16
"""How many compressed bytes are decompressed at a time; for Brotli, about how many bytes of output."""
_SMALL = 4096
"""Compressed bytes below which a body of up to ``_PIECE`` is decompressed on the event loop: a thread costs more."""
_ANY_RATIO = 2**20
"""Bytes up to which a body may be compressed at any ratio."""
_MOST_MEMBERS = 10_000
"""Most members of a gzip body: each costs the copy of a piece, and an empty member has only 20 bytes."""
_WAIT_SECONDS = 30.0
_RETRY_SECONDS = 5.0


class ClientLeft(Exception):
    """The client disconnected; nobody reads the answer."""


async def read_body(
    headers: Mapping[str, str], receive: Receive, limit: int, admission: BodyAdmission | None = None
) -> bytes:
    """Read the body of a request and decompress it.

    Args:
        headers: with lower-case names.
        limit: most bytes, before and after decompression.
        admission: bounds what all bodies take while they arrive; None for no bound.

    Raises:
        BodyTooLarge: the body is larger than ``limit``, or compressed too much.
        UnsupportedEncoding: the Content-Encoding is not known, or names several.
        InvalidRequest: the compressed data is damaged.
        Overloaded: all bodies that arrive are too much, and this is the largest of them.
        ClientLeft: the client disconnected.
    """
    decompress = _decoder(headers) if "content-encoding" in headers else None
    if "expect" in headers and int(headers.get("content-length") or 0) > limit:
        raise _too_large(limit)  # The client sends the body only if it is told to.
    body = await _receive_all(receive, limit, admission := admission or BodyAdmission())
    if decompress is None or not body:
        return body
    ratio = request_limits.current().compression_ratio
    most = min(limit, max(_ANY_RATIO, ratio * len(body)))
    try:
        if len(body) < _SMALL:
            with suppress(BodyTooLarge):
                return decompress(body, min(most, _PIECE))
            async with admission.unpacking:
                return await asyncio.to_thread(decompress, body, most)
        return await asyncio.to_thread(decompress, body, most)
    except BodyTooLarge:
        if most == limit:
            raise
        raise BodyTooLarge(
            f"the request body is compressed to less than a part in {ratio} of its size; send it with less compression "
            "or plain (the operator of this server can raise --limit compression_ratio)"
        ) from None


async def _receive_all(receive: Receive, limit: int, admission: BodyAdmission) -> bytes:
    """Return the whole body. Raises BodyTooLarge when it exceeds ``limit``.

    Bytes beyond the limit are read and dropped, up to the same amount again: a client that is still writing
    would not see the answer, only a broken connection.
    """
    body, size, has_more = ArrivingBody(), 0, True
    try:
        while has_more and size <= 2 * limit:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            piece: bytes = message.get("body", b"")
            has_more = message.get("more_body", False)
            if not (size or has_more) and len(piece) <= limit:
                return piece
            size += len(piece)
            if size <= limit:
                admission.add(body, piece)
        if size > limit:
            raise _too_large(limit)
        return b"".join(body.pieces)
    finally:
        admission.remove(body)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is larger than {limit} bytes; send less, or raise --body-limit")


def _within(out: bytes | bytearray, limit: int) -> bytes:
    if len(out) > limit:
        raise _too_large(limit)
    return bytes(out)


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
    return _within(out, limit)


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
    return _within(out, limit)


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


def _decoder(headers: Mapping[str, str]) -> Callable[[bytes, int], bytes] | None:
    given = headers.get("content-encoding", "")
    names = [name for word in given.lower().split(",") if (name := word.strip()) not in ("", "identity")]
    if not names:
        return None
    if len(names) > 1:
        raise UnsupportedEncoding(f"Content-Encoding has {len(names)} encodings; compress the body once")
    [name] = names
    if name not in _DECODERS:
        known = ", ".join(_DECODERS)
        raise UnsupportedEncoding(
            f"Content-Encoding {name[:32]!a} is not supported; send one of {known}, or the plain body"
        )
    return _DECODERS[name]


class ArrivingBody:
    """A body that has not arrived in full, or that waits on its connection.

    Args:
        drop: called when it is refused to make room; frees what is held elsewhere.

    Attributes:
        pieces: what has arrived, if it is held here.
        size: the bytes that have arrived.
    """

    def __init__(self, drop: Callable[[], None] = lambda: None) -> None:
        self.drop = drop
        self.pieces: list[bytes] = []
        self.size = 0
        self.is_refused = False


class BodyAdmission:
    """Counts the bytes of bodies that arrive, and of those that are decoded, rendered and tokenized (``in_work``).

    Of the bodies that arrive, the largest is refused when they are too much together: a client that sends slowly keeps
    nobody else out. Requests whose body is complete wait for one another, as long as all that wait are not too much
    together. The work on each is bounded, so the wait ends. Small bodies take no part in this: the caller decides.
    """

    def __init__(self) -> None:
        self.arriving = 0
        self.in_work = 0
        self.unpacking = asyncio.Lock()  # for small bodies: each thread keeps the memory that it has used
        self._bodies: set[ArrivingBody] = set()
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def add(self, body: ArrivingBody, piece: bytes) -> None:
        self.grow(body, len(piece))
        body.pieces.append(piece)

    def grow(self, body: ArrivingBody, size: int) -> None:
        """Count ``size`` bytes more of a body whose pieces are held elsewhere.

        Raises:
            Overloaded: the body was dropped, because all that arrive are too much and it was the largest.
        """
        if not body.is_refused:
            self._bodies.add(body)
            body.size += size
            self.arriving += size
            if self.arriving > request_limits.current().bytes_in_preparation and len(self._bodies) > 1:
                largest = max(self._bodies, key=lambda each: each.size)
                largest.is_refused = True
                self.remove(largest)
                largest.drop()
        if body.is_refused:
            raise overloaded()

    def remove(self, body: ArrivingBody) -> None:
        """Forget a body: it has arrived in full, or nobody waits for it."""
        if body in self._bodies:
            self._bodies.remove(body)
            self.arriving -= body.size
            body.pieces.clear()

    async def enter(self, size: int) -> None:
        """Wait until a body of ``size`` bytes can be worked on. Each call needs one of ``leave``, unless it raises.

        Raises:
            Overloaded: it took too long, or the bodies that wait are too much together.
        """
        if not self._waiting and self._has_room(size):
            self.in_work += size
            return
        waiting = sum(each for each, _ in self._waiting)
        if waiting and waiting + size > request_limits.current().bytes_in_preparation:
            raise overloaded()
        place = (size, turn := asyncio.get_running_loop().create_future())
        self._waiting.append(place)
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.leave(size)
            else:
                self._waiting.remove(place)
                self._admit()
            if isinstance(error, TimeoutError):
                raise overloaded() from None
            raise

    def leave(self, size: int) -> None:
        self.in_work -= size
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._has_room(self._waiting[0][0]):
            size, turn = self._waiting.popleft()
            self.in_work += size
            turn.set_result(None)

    def _has_room(self, size: int) -> bool:
        # One that is larger than the limit comes in alone.
        return not self.in_work or self.in_work + size <= request_limits.current().bytes_in_preparation


def overloaded() -> Overloaded:
    """Return the error for a request that finds no room."""
    message = "too many large requests at once; try again in a moment (--limit bytes_in_preparation)"
    return Overloaded(message, retry_after=_RETRY_SECONDS)
