"""Decode server-sent events as a client does: https://html.spec.whatwg.org/multipage/server-sent-events.html."""

from __future__ import annotations

from dataclasses import dataclass


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
