"""Reading request bodies: typed by msgspec, refused in words that name the field.

Each protocol declares its wire types as ``msgspec.Struct`` classes; unknown fields are skipped there. Writing goes
through ``dump``, which survives what a model may write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from singletree.errors import InvalidRequest
from singletree.recent import Recent

T = TypeVar("T")
Made = TypeVar("Made")

JSON_SPACE = " \t\r\n"
"""White space between the tokens of JSON (https://www.rfc-editor.org/rfc/rfc8259#section-2)."""

_AT = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>.*)`$")
_ESCAPE = re.compile(
    rb"\\(?:u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}|u(?P<half>[dD][89a-fA-F][0-9a-fA-F]{2})|.)"
)
_KEY_OF = re.compile(r"`(?P<field>[^`]+)`")


_encode = msgspec.json.Encoder().encode


def dump(value: Any) -> bytes:
    """``value`` as JSON. Half a surrogate pair, which a model can write as an escape, becomes U+FFFD."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return _encode(_encodable(value))


def encodable(text: str) -> str:
    """``text`` with surrogate pairs made one character and U+FFFD for each half: a half has no UTF-8."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, Mapping):
        return {_encodable(key): _encodable(inner) for key, inner in value.items()}
    return [_encodable(inner) for inner in value] if isinstance(value, list | tuple) else value


@lru_cache(maxsize=64)
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def read(body: bytes, kind: type[T]) -> T:
    """``body`` as a value of ``kind``.

    Raises:
        InvalidRequest: with ``param`` as a path such as ``messages.0.content``.
    """
    try:
        return _decode(body, kind)
    except msgspec.ValidationError as error:
        raise refusal(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the request body is not valid JSON ({error}); send one JSON object") from None


def read_each(
    elements: Sequence[msgspec.Raw],
    kind: type[T],
    make: Callable[[T, str], Made],
    at: str,
    keeps: Callable[[Made], bool] = lambda made: True,
) -> list[Made]:
    """What ``make`` gives for each of ``elements``, read as ``kind``, and its path.

    A conversation comes whole with every request. What was made of an element is the very same object the next time
    that the same bytes come, so that whoever works on it can tell what is new.

    Args:
        make: gives, for the same bytes, what may be shared and never changes.
        at: the path of the elements.
        keeps: whether ``make`` would give the same in another place.

    Raises:
        InvalidRequest: with ``param`` below ``at``.
    """
    made = []
    for i, element in enumerate(elements):
        written = bytes(element)
        # To compare with one that looks alike takes a tenth of the time that a digest of all bytes does.
        looks = make, len(written), written[:_EDGE], written[-_EDGE:]
        known: tuple[bytes, Made] | None = _KNOWN.get(looks)
        if known is None or known[0] != written:
            known = written, make(_read_element(written, kind, f"{at}.{i}"), f"{at}.{i}")
            if keeps(known[1]):
                _KNOWN.put(looks, known, _MADE_BYTES + _MADE_COST * len(written))
        made.append(known[1])
    return made


_KNOWN: Recent[tuple[Callable[..., Any], int, bytes, bytes], tuple[bytes, Any]] = Recent(96 * 2**20)
_EDGE = 64
_MADE_BYTES = 1000
_MADE_COST = 3
"""Bytes for each byte of an element: as it came, and what was made of it."""


def _read_element(written: bytes, kind: type[T], at: str) -> T:
    try:
        return _decode(written, kind)
    except msgspec.ValidationError as error:
        raise refusal(error, at) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{at}: not valid JSON ({error})", param=at) from None


def _decode(body: bytes, kind: type[T]) -> T:
    wanted: Any = kind
    decode = _decoder(wanted).decode
    try:
        return decode(body)  # type: ignore[no-any-return]
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        # Harnesses that cut a string inside an emoji send half of it as an escape, and send it again with every
        # later turn; refusing it would end the session.
        mended = _ESCAPE.sub(lambda m: rb"\ufffd" if m["half"] else m.group(), body)
        if mended == body:
            raise
        return decode(mended)  # type: ignore[no-any-return]


def convert(value: Any, kind: type[T], at: str) -> T:
    """A part of a body that was read untyped, as ``kind``; ``at`` is the path of that part.

    Raises:
        InvalidRequest: with ``param`` below ``at``.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise refusal(error, at) from None


def refusal(error: msgspec.ValidationError, at: str = "") -> InvalidRequest:
    """msgspec's words (``Expected `str`, got `int` - at `$.model```) as a refusal that names the field."""
    text = str(error)
    path = ""
    if found := _AT.search(text):
        path = found["path"].replace("[", ".").replace("]", "").strip(".")
        text = text[: found.start()]
    if text.startswith("Object missing required field"):
        field = _KEY_OF.search(text)
        path = f"{path}.{field['field']}" if path and field else (field["field"] if field else path)
        text = "Field required"
    where = ".".join(p for p in (at, path) if p)
    return InvalidRequest(f"{where}: {text}" if where else text, param=where or None)
