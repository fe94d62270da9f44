"""Format tool call arguments that a client parsed and serialized again, as chat templates print them.

The order of keys and the form of numbers may still be the model's. White space and escapes are the client's, and do
not show how the model wrote the call.
"""

from __future__ import annotations

import json
import re

import msgspec

_PIECE = re.compile(r'("(?>(?:[^"\\]++|\\.)*)")|[ \t\r\n]++|[,:]', re.DOTALL)
_STRING = re.compile(r'("(?>(?:[^"\\]++|\\.)*)")', re.DOTALL)
_RARE_ESCAPES = (r"\u", r"\/")
"""Escapes that ``json.dumps(ensure_ascii=False)`` writes only for control characters, or never."""


def template_json(written: bytes) -> str:
    """Return the JSON text ``written`` as a chat template's ``tojson`` prints it by default.

    There is one space after each comma and colon, and no unnecessary escape.

    Args:
        written: JSON.

    Raises:
        UnicodeDecodeError: ``written`` is not UTF-8.
    """
    try:
        text = msgspec.json.format(written, indent=0).decode()
    except (msgspec.DecodeError, RecursionError):
        # msgspec refuses half a surrogate pair, which JavaScript writes as an escape, and deep nesting.
        return _PIECE.sub(_reformatted, written.decode())
    return _STRING.sub(_reformatted, text) if _has_rare_escape(text) else text


def _reformatted(piece: re.Match[str]) -> str:
    if piece[1] is None:
        return f"{piece[0]} " if piece[0] in ",:" else ""
    if not _has_rare_escape(piece[1]):
        return piece[0]
    try:
        text = json.dumps(json.loads(piece[0], strict=False), ensure_ascii=False)
        text.encode()
    except ValueError:
        return piece[0]  # half a surrogate pair can only be written as an escape
    return text


def _has_rare_escape(text: str) -> bool:
    return any(escape in text for escape in _RARE_ESCAPES)
