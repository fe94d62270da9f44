"""Server-sent events: one encoder, one decoder.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from singletree.protocols.answer import Frame


class _Around(dict[str, tuple[bytes, bytes]]):
    """The bytes before and after the data of an event, by its name. The names are those of protocols, so they are few.

    ``bytes.join`` puts the data between the two, which costs less than a concatenation or a format.
    """

    def __missing__(self, event: str) -> tuple[bytes, bytes]:
        head = b"event: %b\ndata: " % event.encode() if event else b"data: "
        around = self[event] = head, b"\n\n"
        return around


_AROUND = _Around()
_COMMENT = b": keep-alive\n\n"


def encode(frames: Sequence[Frame]) -> bytes:
    """Encode ``frames`` as they are sent, in one piece. Their data must not contain a newline (JSON never does)."""
    if len(frames) == 1:
        [(event, data)] = frames
        return data.join(_AROUND[event]) if data else _COMMENT
    return b"".join([data.join(_AROUND[event]) if data else _COMMENT for event, data in frames])


@dataclass(slots=True)
class ServerSentEvent:
    """One decoded event; ``event`` is empty if the stream names none."""

    event: str
    data: str


class Decoder:
    """Decode a stream that may be cut anywhere. Comments and unknown fields are skipped, as the standard requires."""

    def __init__(self) -> None:
        self._rest = b""
        self._event = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Return the events that ``chunk`` completes."""
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        return [e for line in lines if (e := self._line(line.removesuffix(b"\r").decode("utf-8", "replace")))]

    def _line(self, line: str) -> ServerSentEvent | None:
        if not line:
            return self._dispatch()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        return None

    def _dispatch(self) -> ServerSentEvent | None:
        event = ServerSentEvent(self._event, "\n".join(self._data)) if self._data else None
        self._event, self._data = "", []
        return event
