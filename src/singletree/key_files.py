"""Read a file of API keys, and read it again when it has changed.

The file is TOML, with a table for each name; what the server remembers belongs to the name, whose keys may change:

    [alice]
    sha256 = ["9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"]
    rights = ["inference", "sessions"]
    requests_per_minute = 60
    budget = "generated=2M"
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from singletree.budgets import read_budget
from singletree.errors import BadConfiguration, RateLimited
from singletree.server.settings.api_keys import NOBODY, ApiKey, ChangeLevel, Right, digest_of

_LOG = logging.getLogger(__name__)

_NAME = re.compile(r"(?![0-9a-f]{16}\Z)[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names of owners. Sixteen hexadecimal digits are the owner of a key of ``--api-key``."""

_CHECK_SECONDS = 1.0
"""The file is looked at no more often."""

_USUAL_RIGHTS: frozenset[Right] = frozenset({"inference", "sessions", "inspect"})
_Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


def check_name(name: str) -> None:
    """Raise BadConfiguration unless ``name`` can be the name of an owner."""
    if not _NAME.fullmatch(name):
        raise BadConfiguration(
            f"--key-file: the name {name!a} is not one: use letters, digits, '.', '_' and '-', at most 64, and not 16 "
            "hexadecimal digits"
        )


class _Entry(Struct, forbid_unknown_fields=True):
    sha256: _Digest | list[_Digest]
    rights: frozenset[Right] = _USUAL_RIGHTS
    requests_per_minute: Annotated[float, Meta(gt=0)] | None = None
    budget: str = ""


class RequestRate:
    """How often one name may ask models: a minute's requests at once, which come back evenly.

    ``change`` counts them together with other processes: it gets the function to replace their level by, as of
    ``ChangeLevel``.
    """

    def __init__(
        self,
        per_minute: float,
        change: Callable[[Callable[[Any], Any]], bool] = lambda taken: False,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.per_minute = per_minute
        self._most = max(1.0, per_minute)
        self._per_second = per_minute / 60
        self._change, self._clock = change, clock
        self._level: tuple[float, float] | None = None

    def admit(self) -> None:
        """Count a request. Raises RateLimited."""
        if not self._change(self._taken):
            self._level = self._taken(self._level)

    def _taken(self, level: tuple[float, float] | None) -> tuple[float, float]:
        """Return how many requests are left after one more, and the time: of a clock that all processes share."""
        now = self._clock()
        left, at = level or (self._most, now)
        left = min(self._most, left + (now - at) * self._per_second)
        if left < 1:
            raise RateLimited(
                f"this API key may ask {self.per_minute:g} times a minute; wait, or ask the operator for more",
                retry_after=(1 - left) / self._per_second,
            )
        return left - 1, now


class KeyFile:
    """The keys of a file.

    Raises BadConfiguration where the file cannot be read, or is not of the form above.
    """

    def __init__(self, path: Path) -> None:
        self.change_level: ChangeLevel = lambda name, taken: False
        self._path = path
        self._rates: dict[str, RequestRate] = {}
        self._stamp = _stamp(path)  # Of before it is read: a change meanwhile is found by the next look.
        self._keys = self._read()
        self._next_look = 0.0

    def __call__(self) -> Sequence[ApiKey]:
        """Return the keys that the file has now. Where it cannot be read, those that it had stay valid."""
        if (now := monotonic()) >= self._next_look:
            self._next_look = now + _CHECK_SECONDS
            if (stamp := _stamp(self._path)) != self._stamp:
                self._stamp = stamp
                try:
                    self._keys = self._read()
                    _LOG.info("read %d API keys again", len(self._keys))
                except BadConfiguration as error:
                    _LOG.error("the API keys stay as they were: %s", error.message)
        return self._keys

    def _read(self) -> Sequence[ApiKey]:
        try:
            found = msgspec.convert(tomllib.loads(self._path.read_text(encoding="utf-8")), dict[str, _Entry])
            keys = [key for name, entry in found.items() for key in self._keys_of(name, entry)]
        except (OSError, ValueError) as error:
            reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else str(error)
            raise BadConfiguration(
                f"--key-file {self._path}: {reason}; `singletree key NAME` prints an entry"
            ) from None
        self._rates = {name: rate for name, rate in self._rates.items() if name in found}
        return keys

    def _keys_of(self, name: str, entry: _Entry) -> Iterable[ApiKey]:
        check_name(name)
        owner = NOBODY if "admin" in entry.rights else name
        budget = read_budget(entry.budget, "its budget in --key-file", loops=False) if entry.budget else None
        limits = (
            {"admit": self._rate(name, entry.requests_per_minute).admit} if entry.requests_per_minute else {}
        )
        for digest in [entry.sha256] if isinstance(entry.sha256, str) else entry.sha256:
            yield ApiKey(bytes.fromhex(digest), owner, entry.rights, budget=budget, **limits)

    def _rate(self, name: str, per_minute: float) -> RequestRate:
        """Return the rate of a name: the one it had, unless that was changed, so that a new file begins no minute."""
        known = self._rates.get(name)
        if known is None or known.per_minute != per_minute:
            known = self._rates[name] = RequestRate(per_minute, lambda taken: self.change_level(name, taken))
        return known


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when the file does; None where it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def key(name: str) -> None:
    """Make an API key: print it to standard error, here only, and its entry for --key-file to standard output.

    Parameters
    ----------
    name
        Whose key it is: what the server remembers belongs to this name.
    """
    check_name(name)
    made = f"st-{secrets.token_urlsafe(32)}"
    print(f"key        {made}", file=sys.stderr)
    print(f'["{name}"]\nsha256 = ["{digest_of(made).hex()}"]\n')
