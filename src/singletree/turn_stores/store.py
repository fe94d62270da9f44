"""Stores of generated turns, which outlive a process or are shared by several: the interface, encryption, and SQLite.

A store has names, which are random or digests, and bytes, which are encrypted (``server.capsules``). SQLite in
WAL mode serves the processes of one machine: readers and the writer do not wait for each other.
docs/decisions/turn-store.md compares it with Redis and with a file in shared memory.
"""

from __future__ import annotations

import sqlite3
import time
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from threading import Lock
from typing import Protocol

import msgspec

from singletree.conversation import Part, Reasoning, Text, ToolCall, Turn
from singletree.errors import BadConfiguration
from singletree.private_files import create_private
from singletree.prompts.replay.turn_memory import GeneratedTurn, GenerationPrompt
from singletree.server.capsules import Capsules, Tampered, pack_token_ids, unpack_token_ids

NAME_BYTES = 16
"""Length of the names of turns, keys and conversations."""

RIVALS = 9
"""How many turns a key leads to at most; older ones are forgotten. One more than a turn memory keeps, so that it
learns that there were others."""

_READ_SECONDS, _WRITE_SECONDS = 0.25, 2.0
"""How long one access may wait for other processes. Reads block the turn; writes run in a thread."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS stored_turns (
    at INTEGER PRIMARY KEY AUTOINCREMENT, name BLOB NOT NULL UNIQUE, conversation BLOB NOT NULL,
    bytes INTEGER NOT NULL, sealed BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS stored_turns_conversation ON stored_turns (conversation);
CREATE TABLE IF NOT EXISTS turn_keys (
    at INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL, name BLOB NOT NULL, UNIQUE (key, name)
);
CREATE INDEX IF NOT EXISTS turn_keys_name ON turn_keys (name);
CREATE TABLE IF NOT EXISTS turn_conversations (
    conversation BLOB PRIMARY KEY, used REAL NOT NULL, bytes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS turn_conversations_used ON turn_conversations (used);
"""
# The name of an evicted turn stays while its key has other turns: they tell that one of their rivals is missing.
_DELETE_KEYS = """
DELETE FROM turn_keys WHERE key IN (SELECT key FROM turn_keys WHERE name = ?) AND NOT EXISTS (
    SELECT 1 FROM turn_keys AS others JOIN stored_turns ON stored_turns.name = others.name
    WHERE others.key = turn_keys.key
)
"""
_PARAMETERS = 500
"""How many values one statement gets; SQLite takes 999 in its oldest version."""


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """One turn in a store.

    Attributes:
        conversation: the name of the first turn of its conversation. The turns of a conversation are evicted together.
        sealed: the encrypted turn.
        keys: the names under which it is looked up; empty in a result.
    """

    name: bytes
    conversation: bytes
    sealed: bytes
    keys: Sequence[bytes] = ()


class StoreUnavailable(Exception):
    """A store did not answer, or not in time."""


class TurnStore(Protocol):
    """Turns that outlive the process, or that several processes share. Its methods may be called from several threads.

    All methods but ``close`` raise StoreUnavailable, after a bounded time.

    Attributes:
        is_remote: whether an access can take so long that it must not happen in the event loop.
    """

    is_remote: bool

    def add(self, turn: StoredTurn) -> None:
        """Store ``turn``. It is the latest of the turns of each of its keys."""

    def names(self, keys: Sequence[bytes]) -> list[list[bytes]]:
        """Return for each key the names of its turns, the latest last; evicted ones while the key has others."""

    def turns(self, names: Sequence[bytes]) -> dict[bytes, StoredTurn]:
        """Return the turns with ``names``, by name; those that were evicted are missing."""

    def close(self) -> None: ...


class SqliteTurnStore:
    """Turns in an SQLite file, for the processes of one machine, or of one process that begins again.

    The least recently used conversation is evicted first, its newest turn before the others.

    Args:
        path: the file; it is created if it does not exist.
        limit: size of the turns in bytes above which turns are evicted.
        is_durable: whether the turns have to survive a crash of the machine.

    Raises:
        BadConfiguration: the file cannot be used.
    """

    is_remote = False

    def __init__(self, path: Path, limit: int, *, is_durable: bool = True) -> None:
        self._path = path
        self._limit = limit
        with _usable(path):
            create_private(path)
            self._writer = _connect(path, _WRITE_SECONDS, is_durable=is_durable)
            self._reader = _connect(path, _READ_SECONDS, is_durable=is_durable)
        self._reading, self._writing = Lock(), Lock()

    def most_needed(self) -> Generator[tuple[int, StoredTurn]]:
        """Yield all turns, those evicted last first, with their order of generation. Raises BadConfiguration."""
        query = (
            "SELECT at, name, conversation, sealed FROM turn_conversations JOIN stored_turns USING (conversation)"
            " ORDER BY used DESC, at"
        )
        with _usable(self._path):
            for at, *stored in self._reader.execute(query):
                yield at, StoredTurn(*stored)

    def add(self, turn: StoredTurn) -> None:
        with self._writing:
            try:
                with self._writer:
                    # Without this, two processes that read first could both fail to write.
                    self._writer.execute("BEGIN IMMEDIATE")
                    self._insert(turn)
                    self._evict(turn.conversation)
            except sqlite3.Error as error:
                raise StoreUnavailable(str(error)) from None

    def names(self, keys: Sequence[bytes]) -> list[list[bytes]]:
        found: dict[bytes, list[bytes]] = {}
        for key, name in self._read("SELECT key, name FROM turn_keys WHERE key IN ({}) ORDER BY at", keys):
            found.setdefault(key, []).append(name)
        return [found.get(key, []) for key in keys]

    def turns(self, names: Sequence[bytes]) -> dict[bytes, StoredTurn]:
        query = "SELECT name, conversation, sealed FROM stored_turns WHERE name IN ({})"
        rows = self._read(query, names)
        return {name: StoredTurn(name, conversation, sealed) for name, conversation, sealed in rows}

    def close(self) -> None:
        for lock, connection in ((self._reading, self._reader), (self._writing, self._writer)):
            with lock:
                connection.close()

    def _read(self, query: str, values: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        rows: list[tuple[bytes, ...]] = []
        try:
            with self._reading:
                for at in range(0, len(values), _PARAMETERS):
                    some = values[at : at + _PARAMETERS]
                    rows += self._reader.execute(query.format(",".join("?" * len(some))), some)
        except sqlite3.Error as error:
            raise StoreUnavailable(str(error)) from None
        return rows

    def _insert(self, turn: StoredTurn) -> None:
        execute, size = self._writer.execute, len(turn.sealed)
        row = (turn.name, turn.conversation, size, turn.sealed)
        if not execute(
            "INSERT INTO stored_turns (name, conversation, bytes, sealed) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (name) DO NOTHING",
            row,
        ).rowcount:
            size = 0
        execute(
            "INSERT INTO turn_conversations VALUES (?, ?, ?)"
            " ON CONFLICT (conversation) DO UPDATE SET used = excluded.used, bytes = bytes + excluded.bytes",
            (turn.conversation, time.time(), size),
        )
        for key in turn.keys:
            execute("INSERT OR REPLACE INTO turn_keys (key, name) VALUES (?, ?)", (key, turn.name))
            execute(
                "DELETE FROM turn_keys WHERE key = ? AND at NOT IN"
                " (SELECT at FROM turn_keys WHERE key = ? ORDER BY at DESC LIMIT ?)",
                (key, key, RIVALS),
            )

    def _evict(self, newest: bytes) -> None:
        execute = self._writer.execute
        [size] = execute("SELECT total(bytes) FROM turn_conversations").fetchone()
        while size > self._limit:
            least = "SELECT conversation FROM turn_conversations ORDER BY conversation = ?, used LIMIT 1"
            [conversation] = execute(least, (newest,)).fetchone()
            last = "SELECT name, bytes FROM stored_turns WHERE conversation = ? ORDER BY at DESC LIMIT 1"
            if (found := execute(last, (conversation,)).fetchone()) is None:
                execute("DELETE FROM turn_conversations WHERE conversation = ?", (conversation,))
                if conversation == newest:
                    return
                continue
            size -= found[1]
            execute("DELETE FROM stored_turns WHERE name = ?", (found[0],))
            execute(_DELETE_KEYS, (found[0],))
            execute(
                "UPDATE turn_conversations SET bytes = bytes - ? WHERE conversation = ?",
                (found[1], conversation),
            )


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadConfiguration(f"--turn-memory-path {path}: {reason}") from None


def _connect(path: Path, seconds: float, *, is_durable: bool) -> sqlite3.Connection:
    # Transactions are begun by hand: the module would begin one only before the first change.
    database = sqlite3.connect(path, timeout=seconds, check_same_thread=False, isolation_level=None)
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables and "stored_turns" not in tables:
        raise sqlite3.DatabaseError("it is not a file of turns; give another path, or delete the file")
    database.execute("PRAGMA journal_mode = WAL")
    database.execute(f"PRAGMA synchronous = {'NORMAL' if is_durable else 'OFF'}")
    database.executescript(_SCHEMA)
    return database


_PURPOSE = b"singletree turn 1"


class _Text(msgspec.Struct, array_like=True, frozen=True, tag="text"):
    text: str
    is_reasoning: bool
    id: str = ""


class _Call(msgspec.Struct, array_like=True, frozen=True, tag="call"):
    name: str
    arguments: str
    id: str
    complete: bool
    written_id: str = ""


class _Record(msgspec.Struct, array_like=True, frozen=True):
    fingerprint: bytes
    parts: list[_Text | _Call]
    opening: tuple[str, str, str, str, float]
    history_digest: str
    count: int
    token_ids: bytes
    has_unique_ids: bool


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Record).decode


def seal_turn(known: GeneratedTurn, capsules: Capsules) -> bytes:
    """Return ``known`` encrypted; empty if it cannot be written."""
    parts: list[_Text | _Call] = []
    for part in known.turn.parts:
        if isinstance(part, ToolCall):
            parts.append(_Call(part.name, part.arguments, part.id, part.complete, part.written_id))
        elif isinstance(part, Text | Reasoning):
            id = part.id if isinstance(part, Reasoning) else ""
            parts.append(_Text(part.text, isinstance(part, Reasoning), id))
    ids = known.token_ids
    record = _Record(
        capsules.fingerprint,
        parts,
        astuple(known.opening),
        known.history_digest,
        len(ids),
        pack_token_ids(ids),
        known.has_unique_ids,
    )
    try:
        return capsules.seal_bytes(_encode(record), _PURPOSE)
    except UnicodeEncodeError:
        return b""  # A lone surrogate, from an escape in a name, has no UTF-8: the turn is not written.


def open_turn(sealed: bytes, capsules: Capsules) -> GeneratedTurn | None:
    """Return the turn; None if another key or model wrote it, or it is damaged."""
    try:
        data = capsules.open_bytes(sealed, _PURPOSE)
        record = None if data is None else _decode(data)
        if record is None or record.fingerprint != capsules.fingerprint:
            return None
        token_ids = unpack_token_ids(record.token_ids, record.count)
    except (Tampered, ValueError, zlib.error, msgspec.DecodeError):
        return None
    return GeneratedTurn(
        Turn("assistant", tuple(map(_part, record.parts))),
        GenerationPrompt(*record.opening),
        token_ids,
        record.history_digest,
        has_unique_ids=record.has_unique_ids,
    )


def _part(stored: _Text | _Call) -> Part:
    if isinstance(stored, _Call):
        return ToolCall(
            stored.name, stored.arguments, stored.id, stored.complete, written_id=stored.written_id
        )
    return Reasoning(stored.text, id=stored.id) if stored.is_reasoning else Text(stored.text)
