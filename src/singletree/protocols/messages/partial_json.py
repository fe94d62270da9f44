"""The ``input`` of a ``tool_use`` block in a body: arguments as JSON, also those of a cut call.

``input`` has to be an object, while a stream may end in the middle of one. A cut call keeps every value that was
complete; the official SDKs do the same with the deltas of a stream, so a body and a stream give the same result.
"""

from __future__ import annotations

import re

import msgspec

from singletree.protocols import wire

# One token of JSON: an opening, a closing, a string, a complete number or literal, a separator.
_TOKEN = re.compile(
    r"""[ \t\r\n]*(?:([\[{])|([\]}])|("(?>(?:[^"\\]++|\\.)*)")"""
    r"""|((?:-?(?:0|[1-9][0-9]*+)(?>(?:\.[0-9]+)?)(?>(?:[eE][+-]?[0-9]+)?)|true|false|null)"""
    r"""(?=[ \t\r\n,\]}]|\Z))|([:,]))""",
    re.DOTALL,
)
_CLOSES = {"{": "}", "[": "]"}


def tool_input(arguments: str, *, complete: bool) -> msgspec.Raw:
    """Return ``arguments`` unchanged if they are complete JSON, else their complete values; ``{}`` if empty."""
    text = wire.encodable(arguments).strip(wire.JSON_SPACE) or "{}"
    return msgspec.Raw((text if complete and _is_json(text) else complete_values(text)).encode())


def complete_values(text: str) -> str:
    """Return the complete values in ``text``, the beginning of a JSON text: ``{"a": 1, "b": "x`` gives ``{"a": 1}``.

    Kept values are unchanged. Text that does not begin an object or an array gives ``{}``.
    """
    if not text.startswith(("{", "[")):
        return "{}"
    kept, at, key = 0, 0, False
    unclosed: list[str] = []
    while token := _TOKEN.match(text, at):
        opening, shut, string, atom, separator = token.groups()
        at = token.end()
        if opening:
            unclosed.append(_CLOSES[opening])
            key = opening == "{"
        elif shut:
            unclosed.pop()
        elif separator:
            key = separator == "," and unclosed[-1] == "}"
        if opening or shut or atom or (string and not key):
            kept = at
        if not unclosed:
            break
    whole = text[:kept] + "".join(reversed(unclosed))
    return whole if _is_json(whole) else "{}"


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return True
