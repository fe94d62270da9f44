"""What an answer is made of: its context, the frames of its stream, its finished choices.

An encoder turns events into frames. Frames are not bytes of a transport: server-sent events (``encode_sse``), a
WebSocket and the log of a background response each write them in their own way, so nothing reads what was written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from singletree.conversation import Request, Turn
from singletree.errors import SingletreeError
from singletree.events import Event, Finished, Usage

Frame = tuple[str, bytes]
"""One event of a stream: its name (empty on APIs that name none), and its data on one line, which is JSON except for
OpenAI's ``[DONE]``. It is a plain tuple, because one is made for every token."""

KEEP_ALIVE: Frame = ("", b"")
"""A frame without data. It keeps a connection open and is no event: an event stream gets a comment, others nothing."""

Seal = Callable[[int], str]
"""Returns the capsule for a finished span of reasoning, by the index of the span."""

SealEnd = Callable[[], str]
"""Returns the capsule of what follows the last reasoning of a turn that is over; empty if none is needed."""


class EncodedItem(NamedTuple):
    """One output item of a response: its fields, and the same as JSON."""

    fields: Mapping[str, Any]
    json: bytes


class EncodedResponse(NamedTuple):
    """A finished response of the Responses API: its id, the object as JSON, and its output items."""

    id: str
    json: bytes
    items: Sequence[EncodedItem] = ()


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """What the encoder of one choice needs to know besides the events.

    Attributes:
        created: when the answer was created, in unix seconds.
        new_id: creates ids for items, from their prefix; for ``req_`` it returns the id of the request.
        usage: the token counts that are known before the first token.
        seal: makes the capsule of a span of reasoning; None for no capsules.
        seal_end: makes the capsule of what follows the last span; None for none.
        keep: gets the finished response of an API that stores responses, before it is sent; None to store nothing.
        clock: returns the time in unix seconds.
    """

    request: Request
    id: str
    created: int
    new_id: Callable[[str], str]
    usage: Usage = field(default_factory=Usage)
    index: int = 0
    seal: Seal | None = None
    seal_end: SealEnd | None = None
    keep: Callable[[EncodedResponse], None] | None = None
    clock: Callable[[], float] = time.time

    def sealed_end(self, finished: Finished) -> str:
        """Return the capsule of what follows the last reasoning of a turn that ended by itself; empty for none."""
        return self.seal_end() if self.seal_end is not None and finished.reason == "stop" else ""


class FinishedChoice(NamedTuple):
    """A choice that is over."""

    context: AnswerContext
    turn: Turn
    finished: Finished


class EventEncoder(Protocol):
    """Interface: encode the events of one choice, in a stream that it may share with other choices.

    ``start``, then ``feed`` for each event, then ``end``. ``tail`` follows the end of the last choice. ``keep_alive``,
    ``tail`` and ``fail`` are called on the encoder of the first choice only, for the whole stream.
    """

    def start(self) -> list[Frame]:
        """Return the frames that begin the choice."""

    def feed(self, event: Event) -> list[Frame]:
        """Return the frames for an event; none if the protocol has none for it."""

    def keep_alive(self) -> list[Frame]:
        """Return frames that keep the connection open and carry nothing."""

    def end(self, finished: Finished) -> list[Frame]:
        """Return the frames that end the choice."""

    def tail(self, usage: Usage) -> list[Frame]:
        """Return the frames that end the stream. ``usage`` is the sum over all choices."""

    def fail(self, error: SingletreeError) -> list[Frame]:
        """Return the frames that end the stream with an error."""

    def side_event(self, name: str, data: Mapping[str, Any]) -> list[Frame]:
        """Return an event ``name`` outside the protocol, with ``data`` in a no-op event of the protocol."""


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


def encode_sse(frames: Sequence[Frame]) -> bytes:
    """Encode ``frames`` as server-sent events, in one piece. Their data must not contain a newline (JSON never does).

    https://html.spec.whatwg.org/multipage/server-sent-events.html
    """
    if len(frames) == 1:
        [(event, data)] = frames
        return data.join(_AROUND[event]) if data else _COMMENT
    return b"".join([data.join(_AROUND[event]) if data else _COMMENT for event, data in frames])
