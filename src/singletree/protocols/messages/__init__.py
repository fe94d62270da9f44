"""The Anthropic Messages API."""

from singletree.protocols.messages.request import MessagesBody as Body
from singletree.protocols.messages.request import decode, decode_count
from singletree.protocols.messages.stream import ID_PREFIX, Encoder, encode, encode_count, encode_error

__all__ = ["ID_PREFIX", "Body", "Encoder", "decode", "decode_count", "encode", "encode_count", "encode_error"]
