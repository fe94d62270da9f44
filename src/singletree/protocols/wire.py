"""JSON on the wire: requests decoded once for each value, with errors that name the field; text encoded safely.

Each protocol declares its types as ``msgspec.Struct`` classes, which skip unknown fields. Responses are encoded with
``dump``, which accepts any text that a model may write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from math import inf
from operator import is_
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec

from singletree import request_limits
from singletree.errors import InvalidRequest
from singletree.lru import LruCache, find_bytes
from singletree.protocols.limits import check_schema_fields, check_values, malformed

T = TypeVar("T")
Built = TypeVar("Built")

JSON_SPACE = " \t\r\n"
"""White space between the tokens of JSON (https://www.rfc-editor.org/rfc/rfc8259#section-2)."""

_AT = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>.*)`$")
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HALF = re.compile(rb"%b(?!%b)|(?<!%b)%b" % (_HIGH, _LOW, _HIGH, _LOW))
"""Half a surrogate pair, as an escape."""
_PART = re.compile(rb"(?:[^\\]++|%b%b|\\u[0-9a-fA-F]{4}|\\.){1,1000}" % (_HIGH, _LOW), re.DOTALL)
"""A part of JSON that ends between two escapes. It is short, and mended by itself: other threads run in between."""
_KEY_OF = re.compile(r"`(?P<field>[^`]+)`")


_encode = msgspec.json.Encoder().encode
encode_ascii = _encode
"""Encodes ASCII text as ``dump`` does, in a third of the time. Encoders call it for each token."""


_LINE_ENDS = tuple((char.encode(), b"\\u%04x" % ord(char)) for char in "\u0085\u2028\u2029")


def dump(value: Any) -> bytes:
    """Encode ``value`` as JSON that every line reader treats as one line.

    U+0085, U+2028 and U+2029 become escapes: Python's ``str.splitlines`` (httpx's ``iter_lines``) and Node's
    ``readline`` end a line there, which cuts a server-sent event in two. Half a surrogate pair, which a model can
    write as an escape, becomes U+FFFD.
    """
    try:
        data = _encode(value)
    except UnicodeEncodeError:
        data = _encode(_encodable(value))
    # The first bytes of these characters are rare and fast to find; in JSON they occur only inside strings.
    if 0xE2 in data or 0xC2 in data:
        for end, escape in _LINE_ENDS:
            data = data.replace(end, escape)
    return data


def encodable(text: str) -> str:
    """Return ``text`` with surrogate pairs joined and U+FFFD for each unpaired half, which UTF-8 cannot encode."""
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


def decode_body(body: bytes, kind: type[T]) -> T:
    """Decode the JSON ``body`` into a value of ``kind``.

    Raises InvalidRequest, with ``param`` as a path such as ``messages.0.content``; also for too many values.
    """
    check_values(body)
    try:
        return _decode(body, kind)
    except msgspec.ValidationError as error:
        raise field_error(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the request body is not valid JSON ({error}); send one JSON object") from None


def decode_each(
    elements: Sequence[msgspec.Raw],
    kind: type[T],
    make: Callable[[T, str], Built],
    at: str,
    keeps: Callable[[Built], bool] = lambda made: True,
) -> list[Built]:
    """Decode each of ``elements`` as ``kind``, and return the results of ``make``, which gets the value and its path.

    Every request contains the whole conversation. For bytes that were decoded before, the result is the same object
    as then, so that later stages can recognise what is new by identity.

    Args:
        make: returns a value that may be shared and never changes; it depends on the bytes, and on the path only
            where ``keeps`` is False.
        keeps: returns whether a result may be kept and reused at another path.
    """
    request_limits.check("messages", len(elements), what="messages or items", param=at)
    sent = list(map(bytes, elements))
    prefix, looked_up = _longest_prefix(make, sent, at) if len(sent) >= _LONG else (_Prefix(), [])
    last: Any = None
    sent[: len(prefix.sent)] = prefix.sent  # Equal ones, of which one copy is kept.
    made, keys, unshared = [*prefix.made], [*prefix.keys], prefix.unshared
    for i in range(len(made), len(sent)):
        element = sent[i]
        key, known = looked_up.pop() if looked_up else ((), None)
        if known is None:
            # Also of one that was not found above: an equal one may be before it.
            key, known = find_bytes(_KNOWN, make, element)
        if known is None:
            spend(_ELEMENT_COST + len(element))
            known = element, make(decode_raw(element, kind, f"{at}.{i}"), f"{at}.{i}")
            if not keeps(known[1]):
                made.append(known[1])
                unshared += len(element)
                continue
            _KNOWN.put(key, known, _VALUE_BYTES + _BYTES_FACTOR * len(element))
        sent[i], last = known
        made.append(last)
        keys.append(key)
    if len(sent) >= _LONG and len(made) > len(prefix.made) and made[-1] is last:
        # Before its elements, so that it is evicted before them: it does not count their memory again.
        size = _VALUE_BYTES + _PLACE_BYTES * len(sent) + _BYTES_FACTOR * unshared
        place = _Prefix, at, len(sent), id(last)
        _KNOWN.put(place, _Prefix(sent, made, keys, unshared), size)
        if prefix.made:
            _KNOWN.pop((_Prefix, at, len(prefix.made), id(prefix.made[-1])))
        if not _KNOWN.touch(keys):
            _KNOWN.pop(place)  # An element was too large to be kept.
    return [*made]


class _Prefix(NamedTuple):
    """The first elements of a body, and what was made of them.

    Attributes:
        made: of each element. While the last one is kept here, no other object has its id.
        keys: those of the elements that are known by themselves.
        unshared: bytes of the elements that are known in this place only.
    """

    sent: Sequence[bytes] = ()
    made: Sequence[Any] = ()
    keys: Sequence[tuple[Any, ...]] = ()
    unshared: int = 0


def _longest_prefix(make: Callable[..., Any], sent: list[bytes], at: str) -> tuple[_Prefix, list[_Found]]:
    """Return the longest known prefix of ``sent``, and what is known of the elements behind it, the last one first.

    The elements of the prefix are compared, and marked as used, without a look-up of each.
    """
    spend(_KNOWN_COST * len(sent))
    looked_up: list[_Found] = []
    for length in range(len(sent), 0, -1):
        found = find_bytes(_KNOWN, make, sent[length - 1])
        looked_up.append(found)
        if found[1] is None:
            continue
        key = _Prefix, at, length, id(found[1][1])
        prefix: _Prefix | None = _KNOWN.peek(key)
        if prefix is not None and prefix.sent == (sent if length == len(sent) else sent[:length]):
            if _KNOWN.touch((key, *prefix.keys)):
                return prefix, looked_up[:-1]
            _KNOWN.pop(key)  # An element was evicted: what this refers to is no longer counted.
    return _Prefix(), looked_up


def decode_field(
    field: msgspec.Raw, kind: Any, make: Callable[[Any, str], Built], at: str, *, has_schemas: bool = False
) -> Built:
    """Decode one field of a body as ``kind``, and return the result of ``make``, as ``decode_each`` does.

    Args:
        field: as sent; empty for a field that is absent, which is decoded like null.
        make: returns a value that may be shared and never changes; it depends on the bytes alone.
        at: the path of the field, which is always the same for one ``make``.
        has_schemas: whether it consists of JSON schemas, whose size is limited.
    """
    sent = bytes(field) or b"null"
    key, known = find_bytes(_KNOWN, make, sent)
    if known is None:
        spend(_SCHEMA_COST * len(sent))
        if has_schemas:
            check_schema_fields(sent, at)
        known = sent, make(decode_raw(sent, kind, at), at)
        _KNOWN.put(key, known, _VALUE_BYTES + _PARSED_FACTOR * len(sent))
    return known[1]


class Lengthy(Exception):
    """To decode something takes longer than is allowed (``decode_briefly``). What was decoded is known from then on."""


def decode_briefly(decode: Callable[[], T]) -> T:
    """Return ``decode()``; raise Lengthy if it takes longer than the text of ``BRIEF_BYTES``, some milliseconds."""
    before = _left.set(BRIEF_BYTES)
    try:
        return decode()
    finally:
        _left.reset(before)


def spend(size: int) -> None:
    """Count what takes as long to decode as ``size`` bytes of text. Raises Lengthy, if ``decode_briefly`` decodes."""
    _left.set(left := _left.get() - size)
    if left < 0:
        raise Lengthy


BRIEF_BYTES = 512 * 1024
_left: ContextVar[float] = ContextVar("left", default=inf)
BLOCK_COST, _KNOWN_COST, _ELEMENT_COST, _SCHEMA_COST = 50, 100, 500, 8
"""In bytes of text: a block, an element that is known, a new one beside its text, a byte of a field with objects."""


def known_value(key: tuple[Any, ...], make: Callable[[], tuple[Built, int]]) -> Built:
    """Return the value that is kept for ``key``, else that of ``make``, which is kept from now on.

    Args:
        key: starts with what makes the value, so that no other has the same. An ``id`` in it is that of an object
            that the value refers to: while the value is kept, no other object has that id.
        make: returns the value, and its size in bytes with all that it refers to.
    """
    known: Built | None = _KNOWN.get(key)
    if known is None:
        known, size = make()
        _KNOWN.put(key, known, _VALUE_BYTES + size)
    return known


def limit_known_values(size: int) -> None:
    """Set how many bytes the decoded values may take that are kept for later requests."""
    _KNOWN.resize(size)


_Found: TypeAlias = "tuple[tuple[Any, ...], tuple[bytes, Any] | None]"
"""The key of an element, and the element with what was made of it; None if it is not known."""


_KNOWN: LruCache[tuple[Any, ...], Any] = LruCache(96 * 2**20)
"""The limit is that of ``Config.request_memory`` by default, as far as it is for decoded values."""
_VALUE_BYTES = 1000
_LONG = 8
"""Elements of a body from which its beginning is recognised as a whole. A shorter one is not worth its place."""
_PLACE_BYTES = 100
"""Estimated memory of an element's places in a prefix."""
_BYTES_FACTOR = 3
"""Estimated bytes in memory for each byte of an element: the bytes as sent, and the decoded value."""
_PARSED_FACTOR = 10
"""The same for a field, which may hold schemas: their objects take more memory than text."""


def decode_raw(sent: bytes, kind: Any, at: str) -> Any:
    """Decode a part of a body, whose path is ``at``, as ``kind``. Raises InvalidRequest."""
    try:
        return _decode(sent, kind)
    except msgspec.ValidationError as error:
        raise field_error(error, at) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(at, f"not valid JSON ({error})") from None


def _decode(body: bytes, kind: type[T]) -> T:
    untyped: Any = kind
    decode = _decoder(untyped).decode
    try:
        return decode(body)  # type: ignore[no-any-return]
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        # Harnesses that cut a string inside an emoji send half of it as an escape, and repeat it with every
        # later turn; refusing it would end the session.
        mended = _PART.sub(_mend, body)
        if mended == body or b"\0" in body:
            raise
        return decode(mended)  # type: ignore[no-any-return]


def _mend(part: re.Match[bytes]) -> bytes:
    """Return a part of JSON with U+FFFD for each half of a pair. Escaped backslashes, which begin none, become NUL."""
    plain = part[0].replace(rb"\\", b"\0\0")
    return _HALF.sub("\ufffd".encode(), plain).replace(b"\0\0", rb"\\")


def convert(value: Any, kind: type[T], at: str) -> T:
    """Convert ``value``, an untyped part of a body whose path is ``at``, to ``kind``. Raises InvalidRequest."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise field_error(error, at) from None


def field_error(error: msgspec.ValidationError, at: str = "") -> InvalidRequest:
    """Return msgspec's error (``Expected `str`, got `int` - at `$.model```) as an error that names the field."""
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


_ITEM_BYTES = 24
"""Memory of an item's place in a prefix, and in what was made of it."""


class KnownPrefix(NamedTuple, Generic[Built]):
    """The first items of a request, what was made of them, and the size of all that in bytes."""

    items: Sequence[object]
    made: Built
    size: int


class KnownPrefixes(Generic[Built]):
    """Prefixes of conversations, and what was made of them, in ``limit`` bytes. Safe to use from several threads.

    Every request contains the whole conversation, and the items that it had before are the same objects as before
    (``decode_each``). So what is known of a request is found by identity, at the cost of its new items.
    """

    def __init__(self, limit: int) -> None:
        self._known: LruCache[tuple[int, int], KnownPrefix[Built]] = LruCache(limit)

    def longest(self, items: Sequence[object]) -> KnownPrefix[Built] | None:
        for length in range(len(items), 0, -1):
            # While the prefix is kept, no other object has the id of its last item.
            known = self._known.peek((length, id(items[length - 1])))
            if known is not None and all(map(is_, known.items, items)):
                return self._known.get(_key(known.items))
        return None

    def keep(self, known: KnownPrefix[Built], continued: KnownPrefix[Built] | None = None) -> None:
        """Keep ``known``, in place of the prefix ``continued``: a conversation goes on from its end."""
        if continued is not None:
            self._known.pop(_key(continued.items))
        if known.items:
            self._known.put(_key(known.items), known, known.size + _ITEM_BYTES * len(known.items))


def _key(items: Sequence[object]) -> tuple[int, int]:
    return len(items), id(items[-1])
