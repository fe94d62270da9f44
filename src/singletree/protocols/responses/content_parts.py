"""Decode the content parts of messages and outputs in a Responses request."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from singletree.conversation import Document, Image, Text
from singletree.errors import InvalidRequest
from singletree.protocols import content, wire
from singletree.protocols.limits import malformed
from singletree.protocols.responses.native_tools import WireObject

VisiblePart = Text | Image | Document


class _ImageURL(Struct):
    url: str


class _Part(Struct):
    type: str = "input_text"
    text: str = ""
    refusal: str = ""
    image_url: str | _ImageURL | None = None
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None


def decode_part(given: WireObject, at: str) -> VisiblePart | str:
    """Decode a content part, which becomes ``extra``; return its type if the model does not see parts of that type."""
    part = wire.convert(given, _Part, at)
    decode = _PARTS.get(part.type)
    return part.type if decode is None else decode(part, given, at)


def _image(part: _Part, given: WireObject, at: str) -> VisiblePart:
    url = part.image_url.url if isinstance(part.image_url, _ImageURL) else part.image_url
    if not url:
        raise _not_here(f"{at}.image_url", "the image as a data: URL")
    return content.image(url, given)


def _file(part: _Part, given: WireObject, at: str) -> VisiblePart:
    title = part.filename or ""
    if part.file_data and not part.file_data.startswith("data:"):
        return Document(data=part.file_data, title=title, extra=given)
    url = part.file_data or part.file_url
    if not url:
        raise _not_here(f"{at}.file_data", "the data itself, in base64")
    return content.document(url, title, given)


def _not_here(at: str, cure: str) -> InvalidRequest:
    return malformed(at, f"Field required; files are not stored here, so send {cure}")


_PARTS: dict[str, Callable[[_Part, WireObject, str], VisiblePart]] = {
    **dict.fromkeys(("input_text", "output_text", "text"), lambda part, given, at: Text(part.text, given)),
    "refusal": lambda part, given, at: Text(part.refusal, given),
    "input_image": _image,
    "computer_screenshot": _image,
    "input_file": _file,
}
