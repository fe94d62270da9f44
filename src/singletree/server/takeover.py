"""One place for each request of a session: a second, identical one takes that of the first.

A client that gave a request up sends it again, and behind a proxy nobody learns that it is gone: both run, each
slower than before, until the second is given up as well (alltuner/tale#3396: Bun's fetch after 300 s). So the first
is ended as soon as the second is there. Requests that differ run side by side: sub-agents share their session's name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from singletree.conversation import Request
from singletree.server.sessions import session_key

GiveWay = Callable[[], object]


class Places:
    """Who answers which request now."""

    def __init__(self) -> None:
        self._held: dict[bytes, GiveWay] = {}

    @contextmanager
    def held(self, place: bytes | None, give_way: GiveWay) -> Iterator[None]:
        """Hold ``place`` while the context lasts; whoever held it is told to give way. None is no place at all."""
        if place is None:
            yield
            return
        before, self._held[place] = self._held.get(place), give_way
        if before is not None:
            before()
        try:
            yield
        finally:
            if self._held.get(place) is give_way:
                del self._held[place]


def place_of(headers: Mapping[str, str], request: Request, path: str, body: bytes) -> bytes | None:
    """The place of a request; None for one whose client names no session in its headers.

    A name in the body (``prompt_cache_key``, ``metadata.user_id``) is not enough: programs that draw several answers
    to one prompt share it, and their identical requests are no mistake.

    Args:
        headers: with lower-case names.
        body: after decompression.
    """
    session = session_key(headers, replace(request, session=None))
    if session is None:
        return None
    digest = hashlib.blake2b(body, digest_size=32)
    digest.update(f"\0{path}\0{session}".encode("utf-8", "surrogatepass"))
    return digest.digest()
