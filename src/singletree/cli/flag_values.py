"""Read the values of flags that are more than one word or number, wherever they are given."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, Token

from singletree.errors import BadConfiguration

AsJson = Annotated[bool, Parameter(negative="", help="Print JSON.")]
SavedFolder = Annotated[Path, Parameter(help="The folder of --prefix-cache-path.")]

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ "
_FILE_MARK = "@"
_LARGEST_FILE = 64 * 1024


def byte_count(kind: Any, tokens: Sequence[Token]) -> int:
    """Return a number of bytes that is written like ``256MiB``. Raises ValueError for other texts.

    cyclopts puts the flag, variable or key before the message of a ValueError.
    """
    given = tokens[0].value.strip()
    number = given.rstrip(_LETTERS)
    unit = _UNITS.get(given[len(number) :].strip().upper())
    if unit is None or not number.isdecimal():
        raise ValueError(f"{given!r} is not a number of bytes; give one such as 256MiB.")
    return int(number) * unit


def split_urls(kind: Any, tokens: Sequence[Token]) -> tuple[str, ...]:
    """Split each value at commas: no URL of a server has one."""
    return tuple(dict.fromkeys(url for token in tokens for url in by_commas(kind, token.value)))


def split_entries(kind: Any, tokens: Sequence[Token]) -> tuple[str, ...]:
    """Split each value at commas, and keep empty entries: each is the one of an engine."""
    return tuple(each.strip() for token in tokens for each in token.value.split(","))


def by_commas(kind: Any, value: str, *, delimiter: str | None = None) -> list[str]:
    """Split the value of an environment variable at commas; values may contain white space."""
    return [each.strip() for each in value.split(",") if each.strip()]


def unsplit(kind: Any, value: str, *, delimiter: str | None = None) -> list[str]:
    """Return the value of an environment variable as one: a path may contain white space and commas."""
    return [value] if value else []


def read_secrets(kind: Any, tokens: Sequence[Token]) -> tuple[str, ...]:
    """Return secrets, those in the lines of a file for ``@FILE``: all users of a machine see the arguments of programs.

    Raises:
        BadConfiguration: the file cannot be read, or has no secret.
    """
    return tuple(secret for token in tokens for secret in _secrets(token))


def read_secret(kind: Any, tokens: Sequence[Token]) -> str:
    """Return a secret, that in a file for ``@FILE``.

    Raises:
        BadConfiguration: the file cannot be read, or has not one line.
    """
    token = tokens[-1]
    found = _secrets(token)
    if len(found) != 1:
        raise BadConfiguration(
            f"{_place(token)}: the file has {len(found)} lines; give one with a single line"
        )
    return found[0]


def _read_first_secret(kind: Any, tokens: Sequence[Token]) -> str:
    return _secrets(tokens[-1])[0]


Secret = Annotated[str, Parameter(converter=_read_first_secret, env_var="SINGLETREE_API_KEY")]
"""The type of a command's ``--api-key`` for a running server: the first of the server's own keys will do."""

Arguments = Annotated[str, Parameter(allow_leading_hyphen=True)]
"""The type of arguments of another program, after ``--``."""


def _secrets(token: Token) -> list[str]:
    if not token.value.startswith(_FILE_MARK):
        return [token.value]
    path = Path(token.value.removeprefix(_FILE_MARK)).expanduser()
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
        text = data.decode()
    except OSError as error:
        raise BadConfiguration(f"{_place(token)}: {os.strerror(error.errno or 0)}") from None
    except UnicodeDecodeError:
        raise BadConfiguration(f"{_place(token)}: the file is not text in UTF-8") from None
    found = [line.strip() for line in text.splitlines() if line.strip()]
    if not found or len(data) > _LARGEST_FILE:
        raise BadConfiguration(
            f"{_place(token)}: the file has no secret, or more than {_LARGEST_FILE:,} bytes; put the secret on a line "
            "of its own"
        )
    return found


def _place(token: Token) -> str:
    """Return where a file is named, and the file: never the value of a secret."""
    return f"{token.keyword or token.source} {token.value}"
