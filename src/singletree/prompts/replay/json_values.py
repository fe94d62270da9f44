"""Compares JSON texts by value, so that a round trip through a client's JSON library makes no difference."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")

_PROTOTYPE = "__proto__"
"""JavaScript libraries drop this key, because assigning it changes the object's prototype."""


def canonical_json(arguments: str, change: Callable[[Any], Any] = lambda value: value) -> str:
    """Return the canonical form of a JSON text; a text that is not JSON is returned unchanged.

    Two texts have the same canonical form if JavaScript's ``JSON.parse`` and ``JSON.stringify`` can turn one into the
    other (``after_javascript``). White space, escapes and the order of keys make no difference.

    Args:
        arguments: JSON text; an empty text counts as an empty object.
        change: is applied to the value before it is encoded again.
    """
    try:
        value = after_javascript(json.loads(arguments or "{}", parse_int=float))
        return json.dumps(change(value), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def after_javascript(value: Any) -> Any:
    """Return a JSON value as a client written in JavaScript sends it back.

    Numbers become doubles: large integers are rounded, ``1.0`` is ``1``, ``-0.0`` is ``0``, and a number that a double
    cannot hold (``1e400``, ``NaN``) is null. Lone surrogates become U+FFFD when a string is encoded. The key
    ``__proto__`` disappears.

    Raises:
        RecursionError: the value is nested too deeply.
    """
    if isinstance(value, str):
        return _LONE_SURROGATE.sub("\ufffd", value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return _double(value)
    if isinstance(value, dict):
        return {after_javascript(k): after_javascript(v) for k, v in value.items() if k != _PROTOTYPE}
    return [after_javascript(item) for item in value]


def _double(number: int | float) -> float | None:
    try:
        double = float(number)
    except OverflowError:
        return None
    if not math.isfinite(double):
        return None
    return double or 0.0  # -0.0 is false
