"""What an answer is made of: its context, the frames of its stream, its finished choices.

An encoder turns events into frames. Frames are not bytes of a transport: server-sent events (``sse``), a WebSocket and
the log of a background response each write the same frames in their own way, so nothing reads what was just written.
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
OpenAI's ``[DONE]``. It is a plain tuple, because one is made for every token.
"""

KEEP_ALIVE: Frame = ("", b"")
"""A frame without data. It keeps a connection open and is no event: an event stream gets a comment, others nothing."""

Seal = Callable[[int], str]
"""Returns the capsule for a finished span of reasoning, by the index of the span."""


class SealEnd(Protocol):
    """Makes the capsule of the part of a turn that follows its last reasoning."""

    def __call__(self, *, as_objects: bool) -> str:
        """Return the capsule, once the turn is over; empty if none is needed.

        Args:
            as_objects: whether the protocol carries the arguments of calls as objects.
        """
        ...


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
        id: the id of the answer.
        created: when it was created, in unix seconds.
        new_id: creates ids for items, from their prefix; for ``req_`` it returns the id of the request.
        usage: the token counts that are known before the first token.
        index: the index of the choice.
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


class FinishedChoice(NamedTuple):
    """One finished choice."""

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
        ...

    def feed(self, event: Event) -> list[Frame]:
        """Return the frames for an event; none if the protocol has none for it."""
        ...

    def keep_alive(self) -> list[Frame]:
        """Return frames that keep the connection open and carry nothing."""
        ...

    def end(self, finished: Finished) -> list[Frame]:
        """Return the frames that end the choice."""
        ...

    def tail(self, usage: Usage) -> list[Frame]:
        """Return the frames that end the stream. ``usage`` is the sum over all choices."""
        ...

    def fail(self, error: SingletreeError) -> list[Frame]:
        """Return the frames that end the stream with an error."""
        ...

    def side_event(self, name: str, data: Mapping[str, Any]) -> list[Frame]:
        """Return an event ``name`` outside the protocol, with ``data`` in a no-op event of the protocol."""
        ...
