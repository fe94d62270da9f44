"""How much is too much: the values that sampling fields can have, how long a message quotes a client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from singletree.errors import InvalidRequest

MOST_CHOICES = 128
"""Answers to one request, as on OpenAI's API."""

# Wide where protocols differ (temperature ends at 1 on Messages, at 2 elsewhere): an engine takes both.
_LIMITS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 100.0),
    "top_logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "seed": (-(2**63), 2**64 - 1),
}


def check(body: object) -> None:
    """Refuse ``body`` if one of its sampling fields, those it has, is out of limits.

    Raises:
        InvalidRequest: naming the field, its value and what may be sent.
    """
    for name, (low, high) in _LIMITS.items():
        value = getattr(body, name, None)
        if value is not None and not low <= value <= high:
            told = f"{name} is {value!s:.40}; send a number from {low:g} to {high:g}"
            raise InvalidRequest(told, param=name)


_MOST_METADATA = 16
_LONGEST_KEY = 64
_LONGEST_VALUE = 512


def check_metadata(metadata: Mapping[str, Any] | None) -> None:
    """Refuse what a client wants kept beside a response or conversation if it is more than OpenAI's API keeps.

    Raises:
        InvalidRequest: naming the pair that is too long, or no pair of strings.
    """
    said = metadata or {}
    if len(said) > _MOST_METADATA:
        told = f"metadata has {len(said)} pairs; send at most {_MOST_METADATA}"
        raise InvalidRequest(told, param="metadata")
    for key, value in said.items():
        at = f"metadata.{key[:_LONGEST_KEY]}"
        if len(key) > _LONGEST_KEY:
            told = f"{at}: the key has {len(key)} characters; send at most {_LONGEST_KEY}"
            raise InvalidRequest(told, param=at)
        if not isinstance(value, str):
            raise InvalidRequest(f"{at}: Expected `str`; send the value as text", param=at)
        if len(value) > _LONGEST_VALUE:
            told = f"{at}: the value has {len(value)} characters; send at most {_LONGEST_VALUE}"
            raise InvalidRequest(told, param=at)


def at_least_one(max_tokens: int | None) -> int | None:
    """``max_tokens`` as sampling takes it, never refused. Negative: no limit, as in LM Studio, llama.cpp."""
    return None if max_tokens is None or max_tokens < 0 else max(max_tokens, 1)


def shown(value: str) -> str:
    """A client's own word, in quotes, short and plain enough for a message or a header."""
    return ascii(value if len(value) <= 64 else value[:63] + "…")
