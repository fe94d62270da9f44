"""Encrypts saved states in pieces, with the sealing of capsules and stored turns.

Each piece is sealed for the random id of its file, its number, and whether it is the last: pieces cannot be exchanged,
moved or left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from singletree.errors import BadConfiguration
from singletree.server.capsules.capsule import Capsules, Tampered, parse_keys

_PURPOSE = b"singletree state 1"
_PIECE = 1 << 20


class StateSeal:
    """Seals and opens the states of a folder. Raises BadConfiguration for a key that is too short."""

    def __init__(self, key: str) -> None:
        try:
            self._capsules = Capsules(parse_keys([key], "--prefix-cache-key"), b"")
        except ImportError:
            raise BadConfiguration("--prefix-cache-key: pip install cryptography") from None
        self._piece = _PIECE + len(self._capsules.seal_bytes(b"", b""))

    def seal(self, source: BinaryIO, id: bytes) -> Iterator[bytes]:
        """Yield the sealed pieces of ``source``."""
        data, number = source.read(_PIECE), 0
        while True:
            following = source.read(_PIECE)
            yield self._capsules.seal_bytes(data, self._purpose(id, number, is_last=not following))
            if not following:
                return
            data, number = following, number + 1

    def open(self, source: BinaryIO, size: int, id: bytes) -> Iterator[bytes]:
        """Yield what was sealed as the next ``size`` bytes of ``source``. Raises ValueError."""
        number = 0
        while size > 0:
            data = source.read(min(size, self._piece))
            size -= self._piece
            try:
                opened = self._capsules.open_bytes(data, self._purpose(id, number, is_last=size <= 0))
            except Tampered:
                raise ValueError("it was changed") from None
            if opened is None:
                raise ValueError("it was encrypted with another key; give that one with --prefix-cache-key")
            yield opened
            number += 1

    @staticmethod
    def _purpose(id: bytes, number: int, *, is_last: bool) -> bytes:
        return b"%s%s%d%d" % (_PURPOSE, id, number, is_last)
