"""What every protocol module is to the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from singletree.conversation import Request, Turn
from singletree.errors import SingletreeError
from singletree.events import Event, Finished, Usage
from singletree.protocols import chat, completions, messages, responses, responses_compact
from singletree.server.identity import NewId

Seal = Callable[[int], str]
"""The number of a span of reasoning that is over -> what its client shall carry of it."""


class Encoder(Protocol):
    """Events to the bytes of one stream."""

    def start(self) -> bytes:
        """What is sent at once."""
        ...

    def feed(self, event: Event) -> bytes:
        """What an event says."""
        ...

    def keep_alive(self) -> bytes:
        """A sign of life."""
        ...

    def close(self, finished: Finished) -> bytes:
        """The end."""
        ...

    def fail(self, error: SingletreeError) -> bytes:
        """The end by an error."""
        ...

    def side_event(self, name: str, said: Mapping[str, Any]) -> bytes:
        """An event called ``name`` that is none of the protocol's, its data an event of it that says nothing."""
        ...


class MakeEncoder(Protocol):
    """How an encoder is made."""

    def __call__(
        self,
        request: Request,
        *,
        id: str,
        created: int,
        usage: Usage,
        new_id: NewId,
        seal: Seal | None = None,
    ) -> Encoder:
        """For the stream that answers ``request``."""
        ...


class WireProtocol(Protocol):
    """A module of ``protocols`` for one API."""

    ROUTES: list[tuple[str, str, str]]
    ID_PREFIX: str

    @property
    def Encoder(self) -> MakeEncoder:
        """Its encoder."""
        ...

    def decode(self, body: bytes, headers: Mapping[str, str] = {}) -> Request:
        """Bytes to a request."""
        ...

    def encode(
        self,
        request: Request,
        turn: Turn,
        finished: Finished,
        *,
        id: str,
        created: int,
        new_id: NewId,
        seal: Seal | None = None,
    ) -> bytes:
        """The body of an answer that is not streamed."""
        ...

    def encode_error(self, error: SingletreeError) -> tuple[int, bytes]:
        """HTTP status and body."""
        ...


MESSAGES: WireProtocol = messages
CHAT: WireProtocol = chat
RESPONSES: WireProtocol = responses
COMPACT: WireProtocol = responses_compact
COMPLETIONS: WireProtocol = completions


_BY_PATH = {
    path: protocol
    for protocol in (MESSAGES, CHAT, COMPACT, RESPONSES, COMPLETIONS)
    for _, path, _ in protocol.ROUTES
}


def speaking(path: str, headers: Mapping[str, str]) -> WireProtocol:
    """The protocol to answer in: by path, on shared paths by what only one of them sends."""
    for start, protocol in _BY_PATH.items():
        if path == start or path.startswith(start + "/"):
            return protocol
    return MESSAGES if "anthropic-version" in headers else CHAT


def encode_error(
    error: SingletreeError, path: str, headers: Mapping[str, str], request_id: str
) -> tuple[int, bytes]:
    """HTTP status and body, in the words of the protocol that was asked."""
    protocol = speaking(path, headers)
    if protocol is MESSAGES:
        # The one API that shows the request's id in the body; qwen-code reads no error without it.
        return messages.encode_error(error, request_id=request_id)
    return protocol.encode_error(error)
