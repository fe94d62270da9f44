"""Text to tokens and back, as vLLM's ``/tokenize`` and ``/detokenize`` define it.

https://docs.vllm.ai/en/stable/serving/openai_compatible_server.html#tokenizer-api
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from singletree.conversation import Request
from singletree.errors import InvalidRequest
from singletree.protocols import wire
from singletree.protocols.chat import request as chat


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """A request to tokenize a text (``prompt``) or a conversation (``chat``) as the model's template renders it.

    Attributes:
        model: the model's name; empty for the model that is served.
        add_special_tokens: whether the tokenizer adds its own special tokens (such as a beginning of text).
        return_token_strs: whether to return the text of each token too.
    """

    model: str
    prompt: str | None = None
    chat: Request | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeBody(chat.ChatBody, kw_only=True):
    """The body of a request for the tokens of a text or of a conversation."""

    model: str | None = None  # type: ignore[assignment]  # null is taken here, unlike in a chat
    messages: list[msgspec.Raw] | None = None  # type: ignore[assignment]
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct):
    """The body of a request for the text of tokens; it may name no model, for the one that is served."""

    tokens: list[Annotated[int, msgspec.Meta(ge=0)]]
    model: str | None = None


def decode_tokenize(body: bytes, headers: Mapping[str, str] = {}) -> TokenizeRequest:
    """Decode the JSON ``body``; ``messages`` are decoded as in Chat Completions. Raises InvalidRequest."""
    wanted = wire.decode_body(body, TokenizeBody)
    if (wanted.prompt is None) == (wanted.messages is None):
        given = "neither prompt nor messages is" if wanted.prompt is None else "both prompt and messages are"
        raise InvalidRequest(f"{given} given; send one of the two", param="prompt")
    request = None if wanted.messages is None else chat.build_request(wanted)
    special = wanted.add_special_tokens
    return TokenizeRequest(
        model=wanted.model or "",
        prompt=wanted.prompt,
        chat=request,
        # The chat template writes the special tokens itself.
        add_special_tokens=request is None if special is None else special,
        return_token_strs=bool(wanted.return_token_strs),
    )


def decode_detokenize(body: bytes, headers: Mapping[str, str] = {}) -> DetokenizeBody:
    """Decode the JSON ``body``. Raises InvalidRequest."""
    return wire.decode_body(body, DetokenizeBody)


def encode_tokenize(
    tokens: Sequence[int], *, max_model_len: int, token_strs: Sequence[str] | None = None
) -> bytes:
    """Encode the tokens of a text; ``max_model_len`` is the model's context window in tokens."""
    body = {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens, "token_strs": token_strs}
    return msgspec.json.encode(body)


def encode_detokenize(text: str) -> bytes:
    """Encode the text of decoded tokens."""
    return msgspec.json.encode({"prompt": text})
