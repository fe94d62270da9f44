"""The interface of a protocol module for the server, and which module answers which path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from singletree.conversation import Request
from singletree.errors import SingletreeError
from singletree.events import Usage
from singletree.protocols import chat, messages, responses
from singletree.protocols.answer import AnswerContext, EventEncoder, FinishedChoice
from singletree.protocols.openai import answers
from singletree.protocols.responses import compact


class WireProtocol(Protocol):
    """A module of ``protocols`` for one API."""

    ID_PREFIX: str

    @property
    def Encoder(self) -> Callable[[AnswerContext], EventEncoder]:
        """The class that encodes the stream of one choice."""

    def decode(self, body: bytes, headers: Mapping[str, str] = {}) -> Request:
        """Decode the body of a request. Raises InvalidRequest."""

    def encode(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        """Return the body of a response that is not streamed; ``usage`` is the sum over all choices."""

    def encode_error(self, error: SingletreeError) -> tuple[int, bytes]:
        """Return the HTTP status and the body for ``error``."""


MESSAGES: WireProtocol = messages
CHAT: WireProtocol = chat
RESPONSES: WireProtocol = responses
COMPACT: WireProtocol = compact


PROTOCOLS: Mapping[str, WireProtocol] = {
    "/v1/messages": MESSAGES,
    "/v1/chat/completions": CHAT,
    "/v1/responses/compact": COMPACT,
    "/v1/responses": RESPONSES,
    "/v1/conversations": RESPONSES,
}
"""The protocols, by the path that the routes of each begin with."""

_RAW_PROMPTS: Mapping[str, str] = {"/v1/completions": "prompt", "/inference/v1/generate": "token_ids"}
"""The field of the prompt, by the path of a protocol that is behind a door (``raw_tokens``): errors name it."""


def protocol_for(path: str, headers: Mapping[str, str]) -> WireProtocol:
    """Return the protocol to respond in: by path; on shared paths by a header that only one of them sends."""
    known = PROTOCOLS.get(path)
    if known is not None:
        return known
    for start, protocol in PROTOCOLS.items():
        if path.startswith(start + "/"):
            return protocol
    return MESSAGES if "anthropic-version" in headers else CHAT


def encode_error(
    error: SingletreeError, path: str, headers: Mapping[str, str], request_id: str
) -> tuple[int, bytes]:
    """Return the HTTP status and the body for ``error``, in the protocol of the request."""
    if (prompt := _RAW_PROMPTS.get(path)) is not None:
        return answers.encode_error(error, prompt=prompt)
    protocol = protocol_for(path, headers)
    if protocol is MESSAGES:
        # Only this API has the request's id in the body; qwen-code does not parse an error without it.
        return messages.encode_error(error, request_id=request_id)
    return protocol.encode_error(error)
