"""JSON values that remember how they were written, and ``tojson`` as chat templates know it.

A call's arguments go back into the prompt in the model's own bytes (spacing, key order, ``1.0``, escapes),
although a template takes them as an object and prints them itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

from singletree.prompts.added_tokens import well_formed

_PIN = "\udffd"
"""Stands for a written value while the value around it is printed; no text from outside can hold it."""

_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_LITERALS = {"true": True, "false": False, "null": None}
_TO_ESCAPE = re.compile("[^\x00-\x7e\ud800-\udfff]")

Change = Callable[[str], str]


class WrittenObject(dict[str, Any]):
    """A JSON object and its text. ``items`` gives every pair as written, doubled keys included.

    ``pinned`` keeps the text under any formatting that a template asks for; else only under the default one.
    """

    __slots__ = ("_pairs", "pinned", "written")

    def __init__(self, pairs: list[tuple[str, Any]], written: str, *, pinned: bool) -> None:
        super().__init__(pairs)
        self._pairs = pairs if len(pairs) != len(self) else None
        self.written = written
        self.pinned = pinned

    def items(self) -> Any:
        """The pairs in the order in which they were written."""
        return super().items() if self._pairs is None else self._pairs


class WrittenList(list[Any]):
    """A JSON array and its text."""

    __slots__ = ("pinned", "written")

    def __init__(self, values: list[Any], written: str, *, pinned: bool) -> None:
        super().__init__(values)
        self.written = written
        self.pinned = pinned


class WrittenNumber(float):
    """A number whose text Python would not give back: ``1.0e3``, ``-0``, ``1.50``, thousands of digits."""

    written: str
    pinned = True

    def __new__(cls, written: str) -> WrittenNumber:
        number = super().__new__(cls, written)
        number.written = written
        return number

    def __str__(self) -> str:
        return self.written

    __repr__ = __str__

    def __format__(self, format_spec: str) -> str:
        return format(float(self), format_spec) if format_spec else self.written


_WRITTEN = (WrittenObject, WrittenList, WrittenNumber)


def read_object(text: str, change: Change) -> WrittenObject:
    """The JSON object ``text``, pinned to it, with ``change`` applied to every string in it.

    Half a surrogate pair, which only an escape can write, is read as U+FFFD; the pinned text keeps it.
    Raises ValueError when ``text`` is no JSON object, or one too deep to read.
    """
    try:
        value, end = _value(text, _skip(text, 0), change)
    except (IndexError, RecursionError) as error:
        raise ValueError("no complete JSON value") from error
    if _skip(text, end) != len(text) or not isinstance(value, WrittenObject):
        raise ValueError("no JSON object")
    return value


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _value(text: str, at: int, change: Change) -> tuple[Any, int]:
    opening = text[at]
    if opening == '"':
        string, end = scanstring(text, at + 1, True)
        return change(well_formed(string)), end
    if opening == "{":
        return _object(text, at, change)
    if opening == "[":
        return _array(text, at, change)
    number = _NUMBER.match(text, at)
    if number:
        return _number(number[0]), number.end()
    for literal, value in _LITERALS.items():
        if text.startswith(literal, at):
            return value, at + len(literal)
    raise ValueError(f"no JSON value at {at}")


def _number(text: str) -> int | WrittenNumber:
    try:
        number = int(text)
    except ValueError:
        return WrittenNumber(text)
    return number if str(number) == text else WrittenNumber(text)


def _object(text: str, begin: int, change: Change) -> tuple[WrittenObject, int]:
    pairs: list[tuple[str, Any]] = []
    at = _skip(text, begin + 1)
    while text[at] != "}" or pairs:
        if text[at] != '"':
            raise ValueError(f"no key at {at}")
        key, at = scanstring(text, at + 1, True)
        at = _expect(text, _skip(text, at), ":")
        value, at = _value(text, _skip(text, at), change)
        pairs.append((change(well_formed(key)), value))
        at = _skip(text, at)
        if text[at] == "}":
            break
        at = _skip(text, _expect(text, at, ","))
    return WrittenObject(pairs, change(text[begin : at + 1]), pinned=True), at + 1


def _array(text: str, begin: int, change: Change) -> tuple[WrittenList, int]:
    values: list[Any] = []
    at = _skip(text, begin + 1)
    while text[at] != "]" or values:
        value, at = _value(text, at, change)
        values.append(value)
        at = _skip(text, at)
        if text[at] == "]":
            break
        at = _skip(text, _expect(text, at, ","))
    return WrittenList(values, change(text[begin : at + 1]), pinned=True), at + 1


def _expect(text: str, at: int, character: str) -> int:
    if text[at] != character:
        raise ValueError(f"no {character!r} at {at}")
    return at + 1


def changed(value: Any, change: Change) -> Any:
    """``value`` with ``change`` applied to every string in it, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): changed(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [changed(item, change) for item in value]
    return value


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The ``tojson`` filter with Hugging Face's arguments and defaults: no HTML escapes, Unicode as it is.

    https://github.com/huggingface/transformers, utils/chat_template_utils.py
    """
    formatted = indent is not None or separators is not None or sort_keys
    if isinstance(value, _WRITTEN) and (value.pinned or not formatted):
        text = value.written
    else:
        pins: dict[str, str] = {}
        value = _pinned(value, pins, formatted)
        text = json.dumps(
            value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
        )
        for pin, written in pins.items():
            text = text.replace(pin, written)
    return _TO_ESCAPE.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


def _pinned(value: Any, pins: dict[str, str], formatted: bool) -> Any:
    """``value`` with a placeholder for each written value in it; ``pins`` maps them, quoted, to the texts."""
    if isinstance(value, _WRITTEN) and (value.pinned or not formatted):
        pin = f"{_PIN}{len(pins)}{_PIN}"
        pins[f'"{pin}"'] = value.written
        return pin
    if isinstance(value, dict):
        return {key: _pinned(item, pins, formatted) for key, item in value.items()}
    if isinstance(value, list | tuple | Iterator):
        return [_pinned(item, pins, formatted) for item in value]
    return value


def printed(value: dict[str, Any] | list[Any]) -> WrittenObject | WrittenList:
    """``value`` together with its default JSON text: a template prints it without serialising it again."""
    text = tojson(value)
    if isinstance(value, dict):
        return WrittenObject(list(value.items()), text, pinned=False)
    return WrittenList(value, text, pinned=False)
