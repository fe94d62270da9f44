"""The API keys of a server: to which owner each of them belongs, and what it is good for.

All that the server remembers belongs to the owner whose key a request has (``Service.of``). Where there is one key or
none, and where keys share (``--share-between-keys``), there is one owner, whose name is empty.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from singletree.errors import NotPermitted, Unauthorized
from singletree.server.doors import open_door
from singletree.server.settings.config import Config

NOBODY = ""
"""The owner of what is remembered where keys are not separate. The operator's key (``--admin-key``) has this owner."""

Right = Literal["inference", "sessions", "inspect", "capture", "admin"]
"""What a key may do: ask models; read its sessions; see them in the inspector; read what was captured of them; all of
that for all owners."""

RIGHTS: tuple[Right, ...] = get_args(Right)

_OWNER_BYTES = 8


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that the server accepts.

    Attributes:
        digest: of the key, as of ``digest_of``.
        owner: whose requests have it; ``NOBODY`` for one that sees what belongs to all.
        rights: what it may do.
        admit: called for each turn that the key asks for; raises RateLimited.
        budget: what its owner may spend, as the package of budgets has read it; None for ``--key-budget``.
    """

    digest: bytes
    owner: str
    rights: frozenset[Right]
    admit: Callable[[], None] = lambda: None
    budget: Any = None


ChangeLevel = Callable[[str, Callable[[Any], Any]], bool]
"""Replaces what is kept for a name by what the function returns for it, or for None; returns whether it could. Raises
what the function raises, and then replaces nothing."""


class KeySource(Protocol):
    """Returns the keys that are valid now.

    Attributes:
        change_level: where the requests a minute of its names are counted; where it could not, they are counted here.
    """

    change_level: ChangeLevel

    def __call__(self) -> Sequence[ApiKey]: ...


OpenKeyFile = Callable[[Path], KeySource]
"""Reads a file of keys. Raises BadConfiguration where it is not one."""


class ApiKeys:
    """The keys that a server accepts: those of its flags, and those of ``--key-file``.

    Attributes:
        needed: the rights for which a request needs a key: those that a key of the flags has, or all with a file.
    """

    def __init__(self, config: Config) -> None:
        keys = tuple(dict.fromkeys(config.api_key))
        self._is_shared = config.share_between_keys
        is_separate = (len(keys) > 1 or config.key_file is not None) and not self._is_shared
        trains: Iterable[Right] = () if config.capture_key else ("capture",)
        asks = frozenset[Right]({"inference", "sessions", "inspect", *trains})
        self._fixed = [
            *(ApiKey(digest_of(key), _owner_of(key) if is_separate else NOBODY, asks) for key in keys),
            *(ApiKey(digest_of(key), NOBODY, asks | {"admin"}) for key in config.admin_key),
            *(ApiKey(digest_of(key), NOBODY, frozenset({"capture", "admin"})) for key in config.capture_key),
        ]
        self._file: KeySource | None = None
        if config.key_file is not None:
            open_file: OpenKeyFile = open_door("key file")
            self._file = open_file(config.key_file)
        self.needed = frozenset(
            RIGHTS if self._file is not None else (right for key in self._fixed for right in key.rights)
        )

    def share_rates(self, change: ChangeLevel) -> None:
        """Count the requests a minute of the names of a file by ``change``."""
        if self._file is not None:
            self._file.change_level = change

    @property
    def owners(self) -> tuple[str, ...]:
        """The owners of separate keys, in the order of the keys; none where all keys have one owner."""
        return tuple(dict.fromkeys(key.owner for key in self._known() if key.owner))

    def check(self, headers: Mapping[str, str], right: Right) -> ApiKey:
        """Return the key of a request with these lower-case headers.

        Raises:
            Unauthorized: the request has no key, or one that the server does not know.
            NotPermitted: the key has not this right.
        """
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""]
        if not any(given):
            raise Unauthorized("no API key: send it as x-api-key, or as Authorization: Bearer")
        found, known = None, self._known()
        # Header values are bytes, decoded as Latin-1: a key that the client sent as UTF-8 is encoded so, too.
        forms = (form for key in given for form in (key.encode(), key.encode("latin-1", "replace")))
        for sent in dict.fromkeys(forms):
            digest = hashlib.sha256(sent).digest()
            # All comparisons are made, so that the time taken reveals nothing about the keys.
            for key in known:
                if hmac.compare_digest(digest, key.digest) and found is None:
                    found = key
        if found is None:
            raise Unauthorized("the API key is wrong; send one that the server knows (--api-key, --key-file)")
        if right not in found.rights:
            raise NotPermitted(f"the API key has no right to {right}; ask the operator of this server for it")
        return found

    def _known(self) -> Sequence[ApiKey]:
        if self._file is None:
            return self._fixed
        named = self._file()
        return [*self._fixed, *([replace(key, owner=NOBODY) for key in named] if self._is_shared else named)]


def digest_of(key: str) -> bytes:
    """Return the SHA-256 of a key, which is all that is kept of it: a random key needs no slower digest."""
    return hashlib.sha256(key.encode()).digest()


def _owner_of(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=_OWNER_BYTES, person=b"singletree owner").hexdigest()
