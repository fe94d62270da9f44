"""A turn memory that survives restarts: its turns in an SQLite file, encrypted with the server's key.

The file is read once, when the server starts, and after that only written, by a separate thread: no request waits for
the disk. A turn is deleted from the file when it is evicted from the memory, so both evict in the same order.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

import msgspec

from singletree.conversation import Part, Reasoning, Text, ToolCall, Turn
from singletree.errors import BadConfiguration
from singletree.prompts.replay.generation_prompt import GenerationPrompt
from singletree.prompts.replay.turn_memory import CAPSULE_KEY, GeneratedTurn, TurnMemory
from singletree.server.models.capsule import Capsules, Tampered, pack_token_ids, unpack_token_ids

LOG = logging.getLogger(__name__)

_PURPOSE = b"singletree turn 1"
_TABLE = "CREATE TABLE IF NOT EXISTS turns (id INTEGER PRIMARY KEY AUTOINCREMENT, sealed BLOB NOT NULL)"
_DELETE = "DELETE FROM turns WHERE id = ? RETURNING length(sealed)"
_CLOSING_SECONDS = 5.0


# The tag stands in the files: it stays as it is, whatever the class is called.
class _Text(msgspec.Struct, array_like=True, frozen=True, tag="_Said"):
    text: str
    is_reasoning: bool
    id: str = ""


class _Call(msgspec.Struct, array_like=True, frozen=True, tag="_Call"):
    name: str
    arguments: str
    id: str
    complete: bool


class _Record(msgspec.Struct, array_like=True, frozen=True):
    fingerprint: bytes
    parts: list[_Text | _Call]
    opening: tuple[str, str, str, str, float]
    history_digest: str
    count: int
    token_ids: bytes
    behind: int = 0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Record).decode


@dataclass(frozen=True, slots=True)
class _Change:
    """A row to insert or, without ``remembered``, to delete; ``behind`` is the row of the turn before it, or 0."""

    row: int
    remembered: GeneratedTurn | None = None
    behind: int = 0


class JournalledMemory(TurnMemory):
    """A ``TurnMemory`` that also keeps its turns in a file.

    Args:
        limit: largest size in bytes, of the memory and of the turns in the file.
        path: the file; it is created if it does not exist.
        capsules: encrypt what is written; what they cannot decrypt is skipped.

    Raises:
        BadConfiguration: the file cannot be used.
    """

    def __init__(self, limit: int, path: Path, capsules: Capsules) -> None:
        super().__init__(limit)
        self._file_limit = limit
        self._capsules = capsules
        self._file_bytes = 0
        self._has_warned = False
        self._rows: dict[int, int] = {}
        self._last_row = 0
        self._unreadable: deque[int] = deque()
        self._queue: SimpleQueue[_Change | None] = SimpleQueue()
        try:
            self._file = _opened(path)
            self._load()
        except (OSError, sqlite3.Error) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise BadConfiguration(f"--turn-memory-path {path}: {reason}") from None
        self._writer = Thread(target=self._write, name="turn journal", daemon=True)
        self._writer.start()

    def close(self) -> None:
        """Wait until everything is written, for 5 seconds at most."""
        self._queue.put(None)
        self._writer.join(_CLOSING_SECONDS)

    def _added(self, remembered: GeneratedTurn, behind: GeneratedTurn | None) -> None:
        """Write the turn, unless it came from a capsule: then its client brings it again."""
        if remembered.keys[0].startswith(CAPSULE_KEY):
            return
        self._last_row += 1
        row = self._rows[id(remembered)] = self._last_row
        self._queue.put(_Change(row, remembered, self._rows.get(id(behind), 0)))

    def _dropped(self, remembered: GeneratedTurn) -> None:
        row = self._rows.pop(id(remembered), 0)
        if row:
            self._queue.put(_Change(row))

    def _load(self) -> None:
        """Add the turns in the file to the memory, conversation by conversation, in the order of their last turns."""
        found: dict[int, tuple[GeneratedTurn, int]] = {}
        for row, sealed in self._file.execute("SELECT id, sealed FROM turns ORDER BY id"):
            self._last_row = row
            self._file_bytes += len(sealed)
            turn = open_turn(sealed, self._capsules)
            if turn is None:
                self._unreadable.append(row)
            else:
                found[row] = turn
        for row in _least_needed_first({row: behind for row, (_, behind) in found.items()}):
            known, _ = found[row]
            self._rows[id(known)] = row
            self._restore(known)

    def _write(self) -> None:
        with closing(self._file):
            is_last = False
            while not is_last:
                changes = list(self._waiting())
                is_last = None in changes
                try:
                    self._apply([change for change in changes if change is not None])
                except sqlite3.Error as error:
                    self._warn(error)

    def _waiting(self) -> Iterator[_Change | None]:
        yield self._queue.get()
        try:
            while True:
                yield self._queue.get_nowait()
        except Empty:
            return

    def _apply(self, changes: Sequence[_Change]) -> None:
        gone = {change.row for change in changes if change.remembered is None}
        with self._file:
            for change in changes:
                if change.remembered is None:
                    self._delete(change.row)
                elif change.row not in gone and (
                    sealed := seal_turn(change.remembered, self._capsules, change.behind)
                ):
                    self._file.execute("INSERT INTO turns (id, sealed) VALUES (?, ?)", (change.row, sealed))
                    self._file_bytes += len(sealed)
            # The memory itself stays within the limit; rows that another key or model wrote come in addition.
            while self._file_bytes > self._file_limit and self._unreadable:
                self._delete(self._unreadable.popleft())

    def _delete(self, row: int) -> None:
        self._file_bytes -= sum(length for (length,) in self._file.execute(_DELETE, (row,)).fetchall())

    def _warn(self, error: sqlite3.Error) -> None:
        if not self._has_warned:
            LOG.warning("cannot write turns to --turn-memory-path: %s; they are lost at a restart", error)
        self._has_warned = True


def _opened(path: Path) -> sqlite3.Connection:
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    file = sqlite3.connect(path, check_same_thread=False)
    file.execute("PRAGMA journal_mode = WAL")
    file.execute("PRAGMA synchronous = NORMAL")
    file.execute(_TABLE)
    return file


def _least_needed_first(behind: Mapping[int, int]) -> list[int]:
    """Return the rows in the order in which a full memory evicts them.

    Args:
        behind: each row, in ascending order -> the row of the turn before it in its conversation.
    """
    last = {row: row for row in behind}
    depth: dict[int, int] = {}
    for row, before in behind.items():
        depth[row] = depth.get(before, 0) + 1
    for row in sorted(behind, reverse=True):
        before = behind[row]
        if before in last:
            last[before] = max(last[before], last[row])
    return sorted(behind, key=lambda row: (last[row], -depth[row]))


def seal_turn(known: GeneratedTurn, capsules: Capsules, behind: int = 0) -> bytes:
    """Return ``known`` encrypted, for a file or a store; empty if it cannot be written.

    Args:
        known: the turn.
        capsules: encrypt it.
        behind: the row of the turn before it, where rows have an order.
    """
    parts: list[_Text | _Call] = []
    for part in known.turn.parts:
        if isinstance(part, ToolCall):
            parts.append(_Call(part.name, part.arguments, part.id, part.complete))
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
        behind,
    )
    try:
        return capsules.seal_bytes(_encode(record), _PURPOSE)
    except UnicodeEncodeError:
        return b""  # A lone surrogate, from an escape in a name, has no UTF-8: the turn is not written.


def open_turn(sealed: bytes, capsules: Capsules) -> tuple[GeneratedTurn, int] | None:
    """Return the turn and the row of the turn before it; None if another key or model wrote it, or it is damaged."""
    try:
        data = capsules.open_bytes(sealed, _PURPOSE)
        record = None if data is None else _decode(data)
        if record is None or record.fingerprint != capsules.fingerprint:
            return None
        token_ids = unpack_token_ids(record.token_ids, record.count)
    except (Tampered, ValueError, zlib.error, msgspec.DecodeError):
        return None
    turn = Turn("assistant", tuple(map(_part, record.parts)))
    return GeneratedTurn(
        turn, GenerationPrompt(*record.opening), token_ids, record.history_digest
    ), record.behind


def _part(stored: _Text | _Call) -> Part:
    if isinstance(stored, _Call):
        return ToolCall(stored.name, stored.arguments, stored.id, stored.complete)
    if not stored.is_reasoning:
        return Text(stored.text)
    return Reasoning(stored.text, id=stored.id)
