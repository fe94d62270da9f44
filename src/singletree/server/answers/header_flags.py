"""Server settings that a request can switch on or off with a header."""

from __future__ import annotations

from collections.abc import Mapping

_VALUES = dict.fromkeys(("1", "true", "on", "yes"), True) | dict.fromkeys(("0", "false", "off", "no"), False)


def flag_of(headers: Mapping[str, str], name: str, default: bool) -> bool:
    """Return the value of the header ``name``, or ``default`` where it is absent or not a known value.

    Args:
        headers: the request's headers, names in lower case.
    """
    given = headers.get(name)
    return default if given is None else _VALUES.get(given.strip().lower(), default)
