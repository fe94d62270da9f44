"""Encoders as a client of an event stream sees them: as bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from singletree.conversation import Request, Turn
from singletree.errors import SingletreeError
from singletree.events import Event, Finished, Usage
from singletree.protocols.answer import AnswerContext, EventEncoder, FinishedChoice, encode_sse

from .shapes import numbered


def context(request: Request, **fields: Any) -> AnswerContext:
    """Return a context with counted ids and the given fields."""
    return AnswerContext(**{"request": request, "id": "id-1", "created": 1, "new_id": numbered(), **fields})


class ByteEncoder:
    """An encoder of the only choice of an event stream."""

    def __init__(self, encoder: EventEncoder) -> None:
        self._encoder = encoder

    def start(self) -> bytes:
        """Return the beginning of the stream."""
        return encode_sse(self._encoder.start())

    def feed(self, event: Event) -> bytes:
        """Return the bytes for ``event``."""
        return encode_sse(self._encoder.feed(event))

    def keep_alive(self) -> bytes:
        """Return a keep-alive."""
        return encode_sse(self._encoder.keep_alive())

    def close(self, finished: Finished) -> bytes:
        """Return the end of the choice and of the stream."""
        return encode_sse([*self._encoder.end(finished), *self._encoder.tail(finished.usage)])

    def fail(self, error: SingletreeError) -> bytes:
        """Return the end of a stream that fails."""
        return encode_sse(self._encoder.fail(error))

    def side_event(self, name: str, data: Mapping[str, Any]) -> bytes:
        """Return a side event."""
        return encode_sse(self._encoder.side_event(name, data))

    def whole(self, events: Iterable[Event], finished: Finished) -> bytes:
        """Return the whole stream."""
        return self.start() + b"".join(map(self.feed, events)) + self.close(finished)


def encoder(api: Any, request: Request, **fields: Any) -> ByteEncoder:
    """Return the encoder of ``api`` for a context with ``fields``."""
    return ByteEncoder(api.Encoder(context(request, **fields)))


def body(
    api: Any, request: Request, turn: Turn, finished: Finished, usage: Usage | None = None, **fields: Any
) -> bytes:
    """Return the body of an answer with one choice."""
    choices = [FinishedChoice(context(request, **fields), turn, finished)]
    encoded: bytes = api.encode(choices, finished.usage if usage is None else usage)
    return encoded
