"""The OpenAI Responses API."""

from singletree.protocols.responses.output import encode, encode_error, encode_in_progress
from singletree.protocols.responses.request import ROUTES, build_request, decode, read_body
from singletree.protocols.responses.stream import ID_PREFIX, Encoder

__all__ = [
    "ID_PREFIX",
    "ROUTES",
    "Encoder",
    "build_request",
    "decode",
    "encode",
    "encode_error",
    "encode_in_progress",
    "read_body",
]
