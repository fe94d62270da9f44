"""What the values of a request may be: their range, number and size; and the errors for a field that is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from functools import cache
from typing import Annotated, Any

import msgspec

from singletree import request_limits
from singletree.errors import InvalidRequest


def refused(at: str, why: str) -> InvalidRequest:
    """Return the error for the field ``at``; ``why`` follows its name in the message."""
    return InvalidRequest(f"{at} {why}", param=at)


def malformed(at: str, why: str = "Field required") -> InvalidRequest:
    """Return the error for the field ``at``, with a colon after its name."""
    return InvalidRequest(f"{at}: {why}", param=at)


def quote_value(value: str) -> str:
    """Return a client's ``value`` in quotes, in ASCII and shortened, for an error message or a header."""
    return ascii(value if len(value) <= 64 else value[:63] + "…")


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
    """Check the sampling fields that ``body`` has. Raises InvalidRequest."""
    for name, low, high in _limited_fields(type(body)):
        value = getattr(body, name)
        if value is not None and not low <= value <= high:
            lowest, highest = request_limits.plain_number(low), request_limits.plain_number(high)
            raise refused(name, f"is {value!s:.40}; send a number from {lowest} to {highest}")


@cache
def _limited_fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, float, float], ...]:
    return tuple((name, *limits) for name, limits in _LIMITS.items() if name in kind.__struct_fields__)


def check_logprobs(logprobs: int | None, at: str) -> None:
    """Check a number of alternatives to report, whose field is ``at``. Raises InvalidRequest if it is out of range."""
    most = _LIMITS["top_logprobs"][1]
    if logprobs is not None and not 0 <= logprobs <= most:
        raise refused(at, f"is {logprobs!s:.40}; send a number from 0 to {most}")


def at_least_one(max_tokens: int | None) -> int | None:
    """Return ``max_tokens`` raised to at least 1; None if negative: no limit, as in LM Studio and llama.cpp."""
    return None if max_tokens is None or max_tokens < 0 else max(max_tokens, 1)


def checked_stops(stops: Sequence[str] | str | None, param: str) -> tuple[str, ...]:
    """Return the stop strings in the field ``param``, each once and none empty. Raises InvalidRequest."""
    if not stops:
        return ()
    if isinstance(stops, str):
        stops = (stops,)
    request_limits.check("stop_strings", len(stops), what="stop strings", param=param)
    request_limits.check("stop_characters", sum(map(len, stops)), what="characters", param=param)
    return tuple(dict.fromkeys(stop for stop in stops if stop))


_MAX_PAIRS = 16
_MAX_KEY_LENGTH = 64
_MAX_VALUE_LENGTH = 512


def check_metadata(metadata: Mapping[str, Any] | None) -> None:
    """Check the ``metadata`` of a response or conversation against OpenAI's limits. Raises InvalidRequest."""
    pairs = metadata or {}
    if len(pairs) > _MAX_PAIRS:
        raise refused("metadata", f"has {len(pairs)} pairs; send at most {_MAX_PAIRS}")
    for key, value in pairs.items():
        at = f"metadata.{key[:_MAX_KEY_LENGTH]}"
        if len(key) > _MAX_KEY_LENGTH:
            raise malformed(at, f"the key has {len(key)} characters; send at most {_MAX_KEY_LENGTH}")
        if not isinstance(value, str):
            raise malformed(at, "Expected `str`; send the value as text")
        if len(value) > _MAX_VALUE_LENGTH:
            raise malformed(at, f"the value has {len(value)} characters; send at most {_MAX_VALUE_LENGTH}")


def check_tools(tools: Sized | None, at: str) -> None:
    """Check the number of ``tools``, whose field is ``at``. Raises InvalidRequest if there are too many."""
    request_limits.check("tools", len(tools or ()), what="tools", param=at)


def check_grammar(syntax: str | None, text: str, at: str) -> None:
    """Check the length of a grammar or (``syntax`` is ``regex``) a regular expression, whose field is ``at``."""
    limit = "pattern_characters" if syntax == "regex" else "grammar_characters"
    request_limits.check(limit, len(text), what="characters", param=at)


# Decoding JSON takes time and memory for each value, a hundred times those of a character of text, and holds the
# interpreter meanwhile. So values are counted before. Only what is outside strings counts: a text may hold any amount.
_COUNTED_BYTES = 2**20
"""Smallest size in bytes of a body whose values are counted. A smaller one is decoded in some tens of milliseconds."""

_PIECE_BYTES = 2**18
"""How many bytes are counted at a time: other threads run in between."""


def check_values(body: bytes) -> None:
    """Refuse a body with more values than the limits ``json_values`` and ``json_fields``, with InvalidRequest."""
    if len(body) < _COUNTED_BYTES:
        return
    for values, fields in _counts(body):
        request_limits.check("json_values", values, what="JSON values", param="body")
        request_limits.check("json_fields", fields, what="objects, lists and fields of objects", param="body")


def check_schema_fields(schemas: bytes | Mapping[str, Any], at: str) -> None:
    """Refuse JSON schemas with more fields than the limit ``schema_fields``, with InvalidRequest.

    ``schemas`` are the schemas and what is around them, as JSON; or one that is decoded. ``at`` is their path.
    """
    if isinstance(schemas, bytes) and len(schemas) <= 2 * request_limits.current().schema_fields:
        return  # A list has two bytes at least, a field more: most requests are not worth counting.
    counts = (fields for _, fields in _counts(schemas)) if isinstance(schemas, bytes) else _decoded(schemas)
    for fields in counts:
        request_limits.check("schema_fields", fields, what="fields and lists in its schemas", param=at)


def _counts(json: bytes) -> Iterator[tuple[int, int]]:
    """Yield how many values, and how many objects, lists and fields, ``json`` has up to the end of each piece."""
    values = fields = 0
    in_string, escape = False, b""
    for start in range(0, len(json), _PIECE_BYTES):
        # Pairs of backslashes go first, so that a quote with one before it is escaped.
        piece = (escape + json[start : start + _PIECE_BYTES]).replace(rb"\\", b"")
        escape = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.removesuffix(b"\\").replace(rb"\"", b"").split(b'"')
        outside = b"".join(parts[in_string::2])
        in_string ^= len(parts) % 2 == 0
        opened = outside.count(b"{") + outside.count(b"[")
        values += opened + outside.count(b",")
        fields += opened + outside.count(b":")
        yield values, fields


def _decoded(value: Any) -> Iterator[int]:
    """Yield how many objects, lists and fields there are in ``value``, as they are found."""
    fields, open_values = 0, [value]
    while open_values:
        each = open_values.pop()
        if isinstance(each, Mapping):
            fields += 1 + len(each)
            open_values += each.values()
        elif isinstance(each, list):
            fields += 1
            open_values += each
        else:
            continue
        yield fields
