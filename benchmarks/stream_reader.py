"""A client that costs little: plain sockets and epoll, which counts events and looks at nothing else.

What comes is read as soon as it is there, as by clients each on a machine of its own; a client that is slow
would let the server gather events and seem cheaper than it is.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

_PIECE = 1 << 16
_EVENT = b"\ndata: "
_KEPT = len(_EVENT) - 1
_TAIL = 128  # pieces
_PATIENCE = 60.0  # seconds without a byte on any stream


class WrongAnswer(Exception):
    """The server did not answer as it should have; the text has its answer."""


@dataclass(slots=True)
class Answer:
    """One answer as it is read.

    Attributes:
        first: seconds from the first byte sent to the first piece that holds ``mark``.
        events: lines of data.
        tail: the last pieces of it, for looking at what went wrong or what was counted.
    """

    status: int = 0
    first: float = 0.0
    events: int = 0
    tail: deque[bytes] = field(default_factory=lambda: deque(maxlen=_TAIL))

    @property
    def end(self) -> bytes:
        """Its last thousand bytes."""
        return b"".join(self.tail)[-1000:]


@dataclass(slots=True)
class _Stream:
    connection: socket.socket
    began: float
    answer: Answer = field(default_factory=Answer)
    seam: bytes = b""


def post(path: str, body: bytes, headers: str = "") -> bytes:
    """An HTTP request. The connection is for this one alone, so that its end is the answer's.

    Args:
        headers: more of them, with line ends.
    """
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"{headers}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def read_streams(port: int, requests: Sequence[bytes], mark: bytes) -> list[Answer]:
    """Send all requests at once, each on its own connection, and read every answer to its end.

    Args:
        mark: bytes that only an event with text has.

    Raises:
        WrongAnswer: a status other than 200, no ``mark``, or nothing came for a minute.
    """
    poll = select.epoll()
    streams: dict[int, _Stream] = {}
    for request in requests:
        connection = socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = _Stream(connection, time.perf_counter())
        connection.sendall(request)
        connection.setblocking(False)
        streams[connection.fileno()] = stream
        poll.register(connection.fileno(), select.EPOLLIN)
    answers = [stream.answer for stream in streams.values()]
    try:
        _drain(poll, streams, mark)
        for answer in answers:
            if not answer.first:
                raise WrongAnswer(f"an answer without {mark!r}: {answer.end!r}")
    finally:
        poll.close()
        for stream in streams.values():
            stream.connection.close()
    return answers


def _drain(poll: select.epoll, streams: dict[int, _Stream], mark: bytes) -> None:
    buffer = bytearray(_PIECE)
    while streams:
        ready = poll.poll(_PATIENCE)
        if not ready:
            raise WrongAnswer(f"nothing came for {_PATIENCE:g} s on {len(streams)} streams")
        for number, _ in ready:
            stream = streams[number]
            length = stream.connection.recv_into(buffer)
            if length == 0:
                poll.unregister(number)
                stream.connection.close()
                del streams[number]
            else:
                _count(stream, bytes(buffer[:length]), mark)


def _count(stream: _Stream, data: bytes, mark: bytes) -> None:
    answer = stream.answer
    joined = stream.seam + data
    stream.seam = joined[-_KEPT:]
    answer.events += joined.count(_EVENT)
    answer.tail.append(data)
    if not answer.first:
        _begin(stream, data, mark)


def _begin(stream: _Stream, data: bytes, mark: bytes) -> None:
    answer = stream.answer
    if not answer.status:
        answer.status = int(data[9:12])
    # The mark may be cut in two; whatever comes before the first text is a few pieces.
    head = b"".join(answer.tail)
    if answer.status != 200:
        raise WrongAnswer(head[:1000].decode("utf-8", "replace"))
    if mark in head:
        answer.first = time.perf_counter() - stream.began
