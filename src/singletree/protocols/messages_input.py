"""The ``input`` of a ``tool_use`` block in a body: arguments as JSON, those of a cut call included.

``input`` has to be an object where a stream may end in the middle of one. A cut call holds every value that
was complete, which is what the official SDKs make of the stream's deltas: a body and a stream say the same.
"""

from __future__ import annotations

import re

import msgspec

from singletree.protocols import wire

# One token of JSON: an opening, a closing, a string, a number or word that has ended, a separator.
_TOKEN = re.compile(
    r"""[ \t\r\n]*(?:([\[{])|([\]}])|("(?:[^"\\]++|\\.)*+")"""
    r"""|((?:-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+|true|false|null)"""
    r"""(?=[ \t\r\n,\]}]|\Z))|([:,]))""",
    re.DOTALL,
)
_CLOSES = {"{": "}", "[": "]"}


def tool_input(arguments: str, *, complete: bool) -> msgspec.Raw:
    """``arguments`` as they are spelled when they are complete JSON; ``{}`` for none."""
    text = wire.encodable(arguments).strip(wire.JSON_SPACE) or "{}"
    return msgspec.Raw((text if complete and _is_json(text) else complete_values(text)).encode())


def complete_values(text: str) -> str:
    """What ``text``, a beginning of JSON, holds in whole values: ``{"a": 1, "b": "x`` gives ``{"a": 1}``.

    What is kept keeps its spelling. Text that begins neither an object nor an array gives ``{}``.
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
