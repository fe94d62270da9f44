"""Limits: the values that sampling fields may have, and how much of a client's value an error message quotes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

import msgspec

from singletree.errors import InvalidRequest

MAX_CHOICES = 128
"""The largest number of choices for one request, as on OpenAI's API."""

SALT_LENGTH = 256
CacheSalt = Annotated[str, msgspec.Meta(max_length=SALT_LENGTH)]
"""``cache_salt``, as the client sends it."""

# The wider range where protocols differ (temperature ends at 1 on Messages, at 2 elsewhere): engines take both.
_LIMITS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 100.0),
    "repeat_penalty": (0.0, 100.0),
    "min_tokens": (0, 2**31 - 1),
    "top_logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "seed": (-(2**63), 2**64 - 1),
}


def check_limits(body: msgspec.Struct) -> None:
    """Check the sampling fields that ``body`` has.

    Raises:
        InvalidRequest: a value is out of its limits; the message names the field, its value and the limits.
    """
    for name, low, high in _limited_fields(type(body)):
        value = getattr(body, name)
        if value is not None and not low <= value <= high:
            message = f"{name} is {value!s:.40}; send a number from {low:g} to {high:g}"
            raise InvalidRequest(message, param=name)


@cache
def _limited_fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, float, float], ...]:
    return tuple((name, *limits) for name, limits in _LIMITS.items() if name in kind.__struct_fields__)


_MAX_PAIRS = 16
_MAX_KEY_LENGTH = 64
_MAX_VALUE_LENGTH = 512


def check_metadata(metadata: Mapping[str, Any] | None) -> None:
    """Check the ``metadata`` of a response or conversation against the limits of OpenAI's API.

    Raises:
        InvalidRequest: there are too many pairs, or one is too long or not a pair of strings.
    """
    pairs = metadata or {}
    if len(pairs) > _MAX_PAIRS:
        message = f"metadata has {len(pairs)} pairs; send at most {_MAX_PAIRS}"
        raise InvalidRequest(message, param="metadata")
    for key, value in pairs.items():
        at = f"metadata.{key[:_MAX_KEY_LENGTH]}"
        if len(key) > _MAX_KEY_LENGTH:
            message = f"{at}: the key has {len(key)} characters; send at most {_MAX_KEY_LENGTH}"
            raise InvalidRequest(message, param=at)
        if not isinstance(value, str):
            raise InvalidRequest(f"{at}: Expected `str`; send the value as text", param=at)
        if len(value) > _MAX_VALUE_LENGTH:
            message = f"{at}: the value has {len(value)} characters; send at most {_MAX_VALUE_LENGTH}"
            raise InvalidRequest(message, param=at)


def at_least_one(max_tokens: int | None) -> int | None:
    """Return ``max_tokens`` raised to at least 1; None if negative: no limit, as in LM Studio and llama.cpp."""
    return None if max_tokens is None or max_tokens < 0 else max(max_tokens, 1)


def quote_value(value: str) -> str:
    """Return a client's ``value`` in quotes, in ASCII and shortened, for an error message or a header."""
    return ascii(value if len(value) <= 64 else value[:63] + "…")
