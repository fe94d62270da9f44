"""Server-sent events: one encoder, one decoder.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

from dataclasses import dataclass


def frame(data: bytes, event: str = "") -> bytes:
    """One event as it goes over the wire. ``data`` holds no newline (JSON never does)."""
    if event:
        return b"event: %b\ndata: %b\n\n" % (event.encode(), data)
    return b"data: %b\n\n" % data


@dataclass(slots=True)
class ServerSentEvent:
    """One event as read; ``event`` is empty when the stream gave none."""

    event: str
    data: str


class Decoder:
    """Reads a stream cut anywhere. Comments and unknown fields are skipped, as the standard says."""

    def __init__(self) -> None:
        self._rest = b""
        self._event = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """The events that ``chunk`` completed."""
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
