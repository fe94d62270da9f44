"""JSON values that keep their source text, and the ``tojson`` filter of chat templates.

A call's arguments go back into the prompt in the model's own bytes (spacing, key order, ``1.0``, escapes),
although a template takes them as an object and prints them itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from json.decoder import JSONArray, JSONObject, scanstring  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

from singletree.prompts.tokenizer.added_tokens import GUARD, replace_surrogates

_PIN = "\udffd"
"""Replaces a value with source text while the value around it is printed; no text from outside can hold it."""

_PINNED = re.compile(f'"{_PIN}[0-9]+{_PIN}"')
_SPACES = " \t\n\r"
_MAPPINGS = (dict, Mapping)  # ``dict`` first: the check for another mapping is slow
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_UNIT = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|.", re.DOTALL
)
"""One character of a JSON string: itself, or its escape."""
_TO_ESCAPE = re.compile("[^\x00-\x7e\ud800-\udfff]")
_encode = json.JSONEncoder(ensure_ascii=False).encode  # json.dumps makes an encoder for each text

StringChange = Callable[[str], str]


class SourceObject(dict[str, Any]):
    """A JSON object with its source text. ``items`` returns every pair of the source, including repeated keys.

    ``tojson`` prints the source text under any formatting if it is ``pinned``, else only under the default one.
    """

    __slots__ = ("_pairs", "pinned", "source")

    def __init__(self, pairs: list[tuple[str, Any]], source: str, *, pinned: bool) -> None:
        super().__init__(pairs)
        self._pairs = pairs if len(pairs) != len(self) else None
        self.source = source
        self.pinned = pinned

    @classmethod
    def printed(cls, value: dict[str, Any]) -> SourceObject:
        """Return ``value`` with its default JSON text, so that a template prints it without serialising it again."""
        texts = [f"{_encode(key)}: {_printed(item)}" for key, item in value.items()]
        return cls(list(value.items()), f"{{{', '.join(texts)}}}", pinned=False)

    def items(self) -> Any:
        return super().items() if self._pairs is None else self._pairs


class SourceList(list[Any]):
    """A JSON array with its source text; ``source`` and ``pinned`` as in ``SourceObject``."""

    __slots__ = ("pinned", "source")

    def __init__(self, values: list[Any], source: str, *, pinned: bool) -> None:
        super().__init__(values)
        self.source = source
        self.pinned = pinned

    @classmethod
    def printed(cls, values: list[Any]) -> SourceList:
        return cls(values, f"[{', '.join(map(_printed, values))}]", pinned=False)


class SourceNumber(float):
    """A number that Python would print in another way: ``1.0e3``, ``-0``, ``1.50``, thousands of digits."""

    source: str
    pinned = True

    def __new__(cls, source: str) -> SourceNumber:
        number = super().__new__(cls, source)
        number.source = source
        return number

    def __str__(self) -> str:
        return self.source

    __repr__ = __str__

    def __format__(self, format_spec: str) -> str:
        return format(float(self), format_spec) if format_spec else self.source


_WITH_SOURCE = (SourceObject, SourceList, SourceNumber)


def _printed(value: Any) -> str:
    """A value that has no source text has none inside."""
    return value.source if isinstance(value, _WITH_SOURCE) else _encode(value)


def read_object(text: str, change: StringChange, *, pinned: bool = True) -> SourceObject:
    """Parse the JSON object ``text`` and apply ``change`` to every string in it.

    Half a surrogate pair, which only an escape can write, is read as U+FFFD; the source text keeps it. ``tojson``
    prints ``text`` under any formatting if it is ``pinned``, else only under the default one. Raises ValueError if
    ``text`` is no JSON object, or is nested too deeply.
    """
    if (pairs := _flat_pairs(text)) is not None:
        return _flat_object(pairs, text, change, pinned)
    try:
        value = _SourceDecoder(change, pinned).decode(text)
    except RecursionError as error:
        raise ValueError("the JSON value is nested too deeply") from error
    if not isinstance(value, SourceObject):
        raise ValueError("the text is not a JSON object")
    return value


class _Pairs(list[tuple[str, Any]]):
    """The pairs of a JSON object, which are told apart from a JSON array by the type."""


def _flat_pairs(text: str) -> _Pairs | None:
    """Most arguments are flat. Of a value inside another one, Python's fast decoder does not tell the place."""
    try:
        pairs = _FLAT.decode(text)
    except (ValueError, RecursionError):
        return None
    is_flat = type(pairs) is _Pairs and not any(isinstance(value, list) for _, value in pairs)
    return pairs if is_flat else None


def _flat_object(pairs: _Pairs, text: str, change: StringChange, pinned: bool) -> SourceObject:
    changed = [
        (change(replace_surrogates(key)), change(replace_surrogates(value)) if type(value) is str else value)
        for key, value in pairs
    ]
    return SourceObject(changed, change(text.strip(_SPACES)), pinned=pinned)


def guard_json(text: str, guard: StringChange) -> str:
    """Return JSON ``text`` with ``guard`` applied to each string in it, as it reads without escapes.

    Some formats write the strings of a call's arguments instead of their JSON, so that an escaped special token would
    become a real one. The escapes stay as they are. Text that is not JSON is guarded as a whole.
    """
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return guard(text)
    # No mark may be outside the strings: the arguments are parsed again from this text to render them.
    return _STRING.sub(partial(_guard_string, guard=guard), text)


def _guard_string(string: re.Match[str], guard: StringChange) -> str:
    if "\\" not in string[1]:
        return f'"{guard(string[1])}"'
    escapes = _UNIT.findall(string[1])
    try:
        units = [json.loads(f'"{unit}"', strict=False) if len(unit) > 1 else unit for unit in escapes]
    except ValueError:
        return string[0]
    plain = "".join(units)
    guarded = guard(plain)
    if guarded == plain:
        return string[0]
    remaining = iter(escapes)
    return '"' + "".join(each if each == GUARD else next(remaining) for each in guarded) + '"'


def _number(text: str) -> int | SourceNumber:
    try:
        number = int(text)
    except ValueError:
        return SourceNumber(text)
    return number if str(number) == text else SourceNumber(text)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_FLAT = json.JSONDecoder(
    object_pairs_hook=_Pairs, parse_int=_number, parse_float=_number, parse_constant=_refuse_constant
)


class _SourceDecoder(json.JSONDecoder):
    """Python's decoder in Python: that in C does not tell where a value begins and ends."""

    def __init__(self, change: StringChange, pinned: bool) -> None:
        super().__init__(parse_int=_number, parse_float=_number, parse_constant=_refuse_constant)
        self._change, self._pinned = change, pinned
        self.parse_object, self.parse_array, self.parse_string = self._object, self._array, self._string
        self.scan_once = py_make_scanner(self)

    def _object(
        self, place: tuple[str, int], strict: bool, scan_once: Any, *_: Any
    ) -> tuple[SourceObject, int]:
        text, begin = place
        pairs, end = JSONObject(place, strict, scan_once, None, list)
        changed = [(self._change(replace_surrogates(key)), value) for key, value in pairs]
        return SourceObject(changed, self._change(text[begin - 1 : end]), pinned=self._pinned), end

    def _array(self, place: tuple[str, int], scan_once: Any) -> tuple[SourceList, int]:
        text, begin = place
        values, end = JSONArray(place, scan_once)
        return SourceList(values, self._change(text[begin - 1 : end]), pinned=self._pinned), end

    def _string(self, text: str, begin: int, strict: bool) -> tuple[str, int]:
        string, end = scanstring(text, begin, strict)
        return self._change(replace_surrogates(string)), end


def map_strings(value: Any, change: StringChange) -> Any:
    """Return ``value`` with ``change`` applied to every string in it, including keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, _MAPPINGS):
        return {change(str(key)): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, change) for item in value]
    return value


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Print ``value`` as JSON with Hugging Face's arguments and defaults: no HTML escapes, Unicode as it is.

    https://github.com/huggingface/transformers, utils/chat_template_utils.py
    """
    formatted = indent is not None or separators is not None or sort_keys
    if isinstance(value, _WITH_SOURCE) and (value.pinned or not formatted):
        text = value.source
    else:
        pins: dict[str, str] = {}
        value = _pinned(value, pins, formatted)
        dump = partial(json.dumps, indent=indent, separators=separators, sort_keys=sort_keys)
        text = dump(value, ensure_ascii=False) if formatted else _encode(value)
        if pins:
            text = _PINNED.sub(lambda pin: pins[pin[0]], text)
    return _TO_ESCAPE.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


def _pinned(value: Any, pins: dict[str, str], formatted: bool) -> Any:
    """Return ``value`` with a pin in place of each value with source text; ``pins`` maps quoted pins to texts."""
    if type(value) is str:  # most values of a schema
        return value
    if isinstance(value, _WITH_SOURCE) and (value.pinned or not formatted):
        pin = f"{_PIN}{len(pins)}{_PIN}"
        pins[f'"{pin}"'] = value.source
        return pin
    if isinstance(value, dict):
        return {key: _pinned(item, pins, formatted) for key, item in value.items()}
    if isinstance(value, list | tuple | Iterator):
        return [_pinned(item, pins, formatted) for item in value]
    return value
