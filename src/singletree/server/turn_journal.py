"""A turn memory that outlives its process: its turns in an SQLite file, sealed with the server's key.

The file is read once, when the server starts, and from then on only written, by a thread of its own: no request waits
for the disk. The oldest turns leave it when it holds more than the memory may.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import astuple
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

import msgspec

from singletree.conversation import Part, Reasoning, Text, ToolCall, Turn
from singletree.errors import BadConfiguration
from singletree.prompts.opening import Opening
from singletree.prompts.replay import Remembered, TurnMemory
from singletree.server.capsule import Capsules, Tampered, packed, unpacked

LOG = logging.getLogger(__name__)

_PURPOSE = b"singletree turn 1"
_TABLE = "CREATE TABLE IF NOT EXISTS turns (id INTEGER PRIMARY KEY AUTOINCREMENT, sealed BLOB NOT NULL)"
_OLDEST = "DELETE FROM turns WHERE id IN (SELECT id FROM turns ORDER BY id LIMIT 16) RETURNING length(sealed)"
_CLOSING_SECONDS = 5.0


class _Said(msgspec.Struct, array_like=True, frozen=True, tag=True):
    text: str
    is_reasoning: bool


class _Call(msgspec.Struct, array_like=True, frozen=True, tag=True):
    name: str
    arguments: str
    id: str
    complete: bool


class _Record(msgspec.Struct, array_like=True, frozen=True):
    fingerprint: bytes
    parts: list[_Said | _Call]
    opening: tuple[str, str, str, str, float]
    place: str
    count: int
    token_ids: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Record).decode


class JournalledMemory(TurnMemory):
    """See TurnMemory.

    Args:
        limit: most bytes in memory, and of turns in the file.
        path: of the file; made when there is none.
        capsules: seal what is written; what they cannot open is passed over.

    Raises:
        BadConfiguration: the file cannot be used.
    """

    def __init__(self, limit: int, path: Path, capsules: Capsules) -> None:
        super().__init__(limit)
        self._room = limit
        self._capsules = capsules
        self._held = 0
        self._failed = False
        self._queue: SimpleQueue[Remembered | None] = SimpleQueue()
        try:
            self._file = _opened(path)
            self._load()
        except (OSError, sqlite3.Error) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise BadConfiguration(f"--turn-memory-path {path}: {reason}") from None
        self._writer = Thread(target=self._write, name="turn journal", daemon=True)
        self._writer.start()

    def remember(self, remembered: Remembered, name: str = "") -> None:
        """See TurnMemory. What has a name of its own can be had again from where it came."""
        super().remember(remembered, name)
        if not name:
            self._queue.put(remembered)

    def close(self) -> None:
        """Wait, for a short while, until all is written."""
        self._queue.put(None)
        self._writer.join(_CLOSING_SECONDS)

    def _load(self) -> None:
        found: list[Remembered] = []
        for sealed in self._newest():
            known = _remembered(sealed, self._capsules)
            if known is not None:
                found.append(known)
        for known in reversed(found):
            super().remember(known)

    def _newest(self) -> Iterator[bytes]:
        """The sealed turns from the last one back, as far as there is room; the others go."""
        too_old = 0
        with closing(self._file.execute("SELECT id, sealed FROM turns ORDER BY id DESC")) as rows:
            for id, sealed in rows:
                if self._held + len(sealed) > self._room:
                    too_old = id
                    break
                self._held += len(sealed)
                yield sealed
        with self._file:
            self._file.execute("DELETE FROM turns WHERE id <= ?", (too_old,))

    def _write(self) -> None:
        with closing(self._file):
            is_last = False
            while not is_last:
                turns = list(self._waiting())
                is_last = None in turns
                try:
                    self._append([_sealed(turn, self._capsules) for turn in turns if turn is not None])
                except sqlite3.Error as error:
                    self._warn(error)

    def _waiting(self) -> Iterator[Remembered | None]:
        yield self._queue.get()
        try:
            while True:
                yield self._queue.get_nowait()
        except Empty:
            return

    def _append(self, turns: list[bytes]) -> None:
        with self._file:
            self._file.executemany(
                "INSERT INTO turns (sealed) VALUES (?)", [(turn,) for turn in turns if turn]
            )
            self._held += sum(map(len, turns))
            while self._held > self._room:
                gone = self._file.execute(_OLDEST).fetchall()
                self._held = self._held - sum(length for (length,) in gone) if gone else 0

    def _warn(self, error: sqlite3.Error) -> None:
        if not self._failed:
            LOG.warning("turns are not written to --turn-memory-path: %s; a restart forgets them", error)
        self._failed = True


def _opened(path: Path) -> sqlite3.Connection:
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    file = sqlite3.connect(path, check_same_thread=False)
    file.execute("PRAGMA journal_mode = WAL")
    file.execute("PRAGMA synchronous = NORMAL")
    file.execute(_TABLE)
    return file


def _sealed(known: Remembered, capsules: Capsules) -> bytes:
    parts: list[_Said | _Call] = []
    for part in known.turn.parts:
        if isinstance(part, ToolCall):
            parts.append(_Call(part.name, part.arguments, part.id, part.complete))
        elif isinstance(part, Text | Reasoning):
            parts.append(_Said(part.text, isinstance(part, Reasoning)))
    ids = known.token_ids
    record = _Record(capsules.fingerprint, parts, astuple(known.opening), known.place, len(ids), packed(ids))
    try:
        return capsules.seal_bytes(_encode(record), _PURPOSE)
    except UnicodeEncodeError:
        return b""  # half a character, spelled as an escape in a name: nothing to write


def _remembered(sealed: bytes, capsules: Capsules) -> Remembered | None:
    """None for what another key or model sealed, and for what the disk spoilt."""
    try:
        data = capsules.open_bytes(sealed, _PURPOSE)
        record = None if data is None else _decode(data)
        if record is None or record.fingerprint != capsules.fingerprint:
            return None
        token_ids = unpacked(record.token_ids, record.count)
    except (Tampered, ValueError, zlib.error, msgspec.DecodeError):
        return None
    turn = Turn("assistant", tuple(map(_part, record.parts)))
    return Remembered(turn, Opening(*record.opening), token_ids, record.place)


def _part(said: _Said | _Call) -> Part:
    if isinstance(said, _Call):
        return ToolCall(said.name, said.arguments, said.id, said.complete)
    return Reasoning(said.text) if said.is_reasoning else Text(said.text)
