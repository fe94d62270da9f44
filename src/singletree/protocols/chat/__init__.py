"""The OpenAI Chat Completions API."""

from singletree.protocols.chat.request import ChatBody as Body
from singletree.protocols.chat.request import decode
from singletree.protocols.chat.stream import ID_PREFIX, Encoder, encode

__all__ = ["ID_PREFIX", "Body", "Encoder", "decode", "encode"]
