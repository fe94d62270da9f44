"""The OpenAI Responses API."""

from singletree.protocols.responses.output import encode, encode_count, encode_in_progress
from singletree.protocols.responses.request import ResponsesBody as Body
from singletree.protocols.responses.request import SentRequest, decode, parse_body, resolve_request
from singletree.protocols.responses.stream import ID_PREFIX, Encoder

__all__ = [
    "ID_PREFIX",
    "Body",
    "Encoder",
    "SentRequest",
    "decode",
    "encode",
    "encode_count",
    "encode_in_progress",
    "parse_body",
    "resolve_request",
]
