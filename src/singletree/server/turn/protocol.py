"""The protocols by path, and the interface of their modules, each of which the first request for it loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import Struct

from singletree.conversation import Request
from singletree.errors import SingletreeError
from singletree.events import Usage
from singletree.protocols.answer import AnswerContext, EventEncoder, FinishedChoice
from singletree.protocols.openai import answers
from singletree.server.doors import open_door_in_thread


class WireProtocol(Protocol):
    """A module of ``protocols`` or ``raw_tokens`` for one API."""

    ID_PREFIX: str

    @property
    def Body(self) -> type[Struct]:
        """The type of the body of a request."""

    @property
    def Encoder(self) -> Callable[[AnswerContext], EventEncoder]:
        """The class that encodes the stream of one choice."""

    def decode(self, body: bytes, headers: Mapping[str, str] = {}) -> Request:
        """Decode the body of a request. Raises InvalidRequest."""

    def encode(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        """Return the body of a response that is not streamed; ``usage`` is the sum over all choices."""


@dataclass(slots=True, eq=False)
class ProtocolEntry:
    """A protocol of the server. Most servers have clients of one or two, so each is loaded when it is asked for.

    Attributes:
        name: of its module, and of its door (``server.doors``).
        prompt: the field of the prompt, which errors in OpenAI's form name; empty for a protocol with its own form.
    """

    name: str
    prompt: str = ""
    _module: WireProtocol | None = field(default=None, init=False)

    async def load(self) -> WireProtocol:
        """Return the module; load it in a thread, unless it is loaded."""
        if self._module is None:
            self._module = await open_door_in_thread(f"protocol {self.name}")
        return self._module


MESSAGES = ProtocolEntry("messages")
CHAT = ProtocolEntry("chat", "messages")
RESPONSES = ProtocolEntry("responses", "input")
COMPACT = ProtocolEntry("compact", "input")

PROTOCOLS: Mapping[str, ProtocolEntry] = {
    "/v1/messages": MESSAGES,
    "/v1/chat/completions": CHAT,
    "/v1/responses/compact": COMPACT,
    "/v1/responses": RESPONSES,
    "/v1/conversations": RESPONSES,
    "/v1/completions": ProtocolEntry("completions", "prompt"),
    "/inference/v1/generate": ProtocolEntry("generate", "token_ids"),
}
"""The protocols, by the path that the routes of each begin with."""


def protocol_for(path: str, headers: Mapping[str, str]) -> ProtocolEntry:
    """Return the protocol to respond in: by path; on shared paths by a header that only one of them sends."""
    known = PROTOCOLS.get(path)
    if known is not None:
        return known
    for start, protocol in PROTOCOLS.items():
        if path.startswith(start + "/"):
            return protocol
    return MESSAGES if "anthropic-version" in headers else CHAT


async def encode_error(
    error: SingletreeError, path: str, headers: Mapping[str, str], request_id: str
) -> tuple[int, bytes]:
    """Return the HTTP status and the body for ``error``, in the protocol of the request."""
    protocol = protocol_for(path, headers)
    if protocol.prompt:
        return answers.encode_error(error, prompt=protocol.prompt)
    messages: Any = await protocol.load()
    # Only this API has the request's id in the body; qwen-code does not parse an error without it.
    status, body = messages.encode_error(error, request_id=request_id)
    return status, body
