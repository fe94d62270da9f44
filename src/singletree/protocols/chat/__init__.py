"""The OpenAI Chat Completions API."""

from singletree.protocols.chat.request import decode
from singletree.protocols.chat.stream import ID_PREFIX, Encoder, encode, encode_error

__all__ = ["ID_PREFIX", "Encoder", "decode", "encode", "encode_error"]
