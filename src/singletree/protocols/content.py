"""What clients send back in a form of their own: arguments that they serialized again, images and documents as URLs.

The order of keys and the form of numbers in arguments may still be the model's. White space and escapes are the
client's, and do not show how the model wrote the call.
"""

from __future__ import annotations

import json
import re

import msgspec

from singletree.conversation import Document, Extra, Image

_PIECE = re.compile(r'("(?>(?:[^"\\]++|\\.)*)")|[ \t\r\n]++|[,:]', re.DOTALL)
_STRING = re.compile(r'("(?>(?:[^"\\]++|\\.)*)")', re.DOTALL)
_RARE_ESCAPES = (r"\u", r"\/")
"""Escapes that ``json.dumps(ensure_ascii=False)`` writes only for control characters, or never."""


def template_json(written: bytes) -> str:
    """Return the JSON text ``written`` as a chat template's ``tojson`` prints it by default.

    There is one space after each comma and colon, and no unnecessary escape. Raises UnicodeDecodeError.
    """
    try:
        text = msgspec.json.format(written, indent=0).decode()
    except (msgspec.DecodeError, RecursionError):
        # msgspec refuses half a surrogate pair, which JavaScript writes as an escape, and deep nesting.
        return _PIECE.sub(_reformatted, written.decode())
    return _STRING.sub(_reformatted, text) if _has_rare_escape(text) else text


def argument_text(text: str) -> tuple[str, bool]:
    """Return the arguments of a call that came back as ``text``, and whether they are byte for byte what was sent.

    JSON without any white space between its values is what JavaScript writes, whatever the model wrote, so it is
    formatted as ``template_json`` does. Other text is taken as it is, and no text is an empty object.
    """
    if text.strip() in ("", "null"):
        return "{}", True
    if not text.startswith("{"):
        return text, True
    try:
        written = text.encode()
        is_compact = msgspec.json.format(written, indent=-1) == written
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return text, True
    return (template_json(written), False) if is_compact else (text, True)


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


def image(url: str, extra: Extra | None = None) -> Image:
    """Return the image at ``url``; a base64 ``data:`` URL (RFC 2397) becomes data."""
    media_type, data = _data(url)
    return Image(media_type, data, extra=extra) if data else Image(url=url, extra=extra)


def document(url: str, title: str = "", extra: Extra | None = None) -> Document:
    """Return the document at ``url``, as ``image`` does."""
    media_type, data = _data(url)
    if data:
        return Document(media_type, data, title=title, extra=extra)
    return Document(url=url, title=title, extra=extra)


def _data(url: str) -> tuple[str, str]:
    """Return the media type and the base64 text; both are empty for a URL without base64 data."""
    if url[:5].lower() != "data:":
        return "", ""
    head, comma, data = url[5:].partition(",")
    kind, *attributes = head.split(";")
    if not comma or not attributes or attributes[-1].strip().lower() != "base64":
        return "", ""
    return kind.strip().lower(), data
