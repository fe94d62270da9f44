"""The API keys of a server, and to which owner each of them belongs.

All that the server remembers belongs to the owner whose key a request has (``Service.of``). Where there is one key or
none, and where keys share (``--share-between-keys``), there is one owner, whose name is empty.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from singletree.errors import Unauthorized
from singletree.server.settings.config import Config

NOBODY = ""
"""The owner of what is remembered where keys are not separate. The operator's key (``--admin-key``) has this owner."""

_OWNER_BYTES = 8


class ApiKeys:
    """The keys that a server accepts; with ``captures``, those that may read captured sessions.

    Attributes:
        owners: the owners of separate keys, in the order of the keys; none where all keys have one owner.
    """

    def __init__(self, config: Config, *, captures: bool = False) -> None:
        keys = tuple(dict.fromkeys(config.api_key))
        is_separate = len(keys) > 1 and not config.share_between_keys
        owned = {key: _owner_of(key) if is_separate else NOBODY for key in keys}
        self.owners = tuple(owned.values()) if is_separate else ()
        owned.update(dict.fromkeys(config.admin_key, NOBODY))
        self._flag = "--api-key"
        if captures and config.capture_key:
            owned, self._flag = dict.fromkeys(config.capture_key, NOBODY), "--capture-key"
        # Header values are bytes, decoded as Latin-1: a key that the client sent as UTF-8 has to be compared so, too.
        self._accepted = [
            (text.encode(), owner)
            for key, owner in owned.items()
            for text in dict.fromkeys((key, key.encode().decode("latin-1")))
        ]
        self.are_needed = bool(self._accepted)

    def owner(self, headers: Mapping[str, str]) -> str:
        """Return the owner of a request with these lower-case headers. Raises Unauthorized without a valid key."""
        if not self.are_needed:
            return NOBODY
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""]
        if not any(given):
            raise Unauthorized("no API key: send it as x-api-key, or as Authorization: Bearer")
        found = None
        for one in given:
            sent = one.encode()
            # All comparisons are made, so that the time taken reveals nothing about the keys.
            for key, owner in self._accepted:
                if hmac.compare_digest(sent, key) and found is None:
                    found = owner
        if found is None:
            raise Unauthorized(
                f"the API key is wrong; send a key that the server was started with ({self._flag})"
            )
        return found


def _owner_of(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=_OWNER_BYTES, person=b"singletree owner").hexdigest()
