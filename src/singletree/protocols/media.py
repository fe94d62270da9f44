"""Images and documents given as URLs, including ``data:`` URLs (RFC 2397)."""

from __future__ import annotations

from singletree.conversation import Document, Extra, Image


def image(url: str, extra: Extra | None = None) -> Image:
    """Return the image at ``url``; a base64 ``data:`` URL becomes data."""
    media_type, data = _data(url)
    return Image(media_type, data, extra=extra) if data else Image(url=url, extra=extra)


def document(url: str, title: str = "", extra: Extra | None = None) -> Document:
    """Return the document at ``url``; a base64 ``data:`` URL becomes data."""
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
