"""What the processes of one server count and remember together: what turns have cost, how often keys ask, where loops
were stopped, and which sessions and models were moved.

It is in one SQLite file in the folder that they share while they run, as the turns are: who reads finds what another
process wrote before. It must never stop a turn: an access has a bounded time, and costs that cannot be written are
written with those of the next turn.
"""

from __future__ import annotations

import logging
import sqlite3
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from operator import add
from pathlib import Path
from typing import Any

import msgspec

from singletree.errors import BadConfiguration
from singletree.lru import LruCache
from singletree.private_files import create_private
from singletree.server.http.service import Service
from singletree.server.sessions.step import Cost, CostSums, charged
from singletree.server.sparse_log import OncePerMinute

LOG = logging.getLogger(__name__)

_WAIT_SECONDS = 0.25
"""How long one access may wait for other processes, which write for less than a millisecond."""

_KEPT = 4096
"""Entries of each map; those that were written least recently are dropped."""

_TOTAL = "total"
"""The name of the map with all sums of an owner."""

_UNWRITTEN = 1000
"""Turns whose costs wait for a file that cannot be written."""

_SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS shared (
    at INTEGER PRIMARY KEY AUTOINCREMENT, map TEXT NOT NULL, key BLOB NOT NULL, value BLOB NOT NULL, UNIQUE (map, key)
);
CREATE INDEX IF NOT EXISTS shared_age ON shared (map, at);
"""
_GET = "SELECT value FROM shared WHERE map = ? AND key = ?"
_DROP = """
DELETE FROM shared WHERE map = ? AND at <= (SELECT at FROM shared WHERE map = ? ORDER BY at DESC LIMIT 1 OFFSET ?)
"""

Entry = tuple[str, bytes]
"""The name of a map, and a key of it."""

_encode, _decode = msgspec.json.encode, msgspec.json.decode


class SharedState:
    """The file that all processes of a server have open: entries of several maps, as JSON.

    Raises BadConfiguration where it cannot be used.
    """

    def __init__(self, path: Path) -> None:
        try:
            create_private(path)
            self._database = sqlite3.connect(path, timeout=_WAIT_SECONDS, isolation_level=None)
            self._database.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise BadConfiguration(f"{path}: {error}; set TMPDIR to a folder of this machine") from None
        self._failures = OncePerMinute()

    def run(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of ``query``; none where the file cannot be used now."""
        try:
            return self._database.execute(query, values).fetchall()
        except sqlite3.Error as error:
            self._note(error)
            return []

    def get(self, entry: Entry) -> Any:
        found = self.run(_GET, *entry)
        return _decode(found[0][0]) if found else None

    def change(self, changes: Mapping[Entry, Callable[[Any], Any]]) -> bool:
        """Replace the value of each entry by what its function returns for it, or for None: all at once, or nothing.

        Return whether it was done.
        """
        try:
            with self._database as database:
                database.execute("BEGIN IMMEDIATE")
                for entry, changed in changes.items():
                    found = database.execute(_GET, entry).fetchone()
                    row = (*entry, _encode(changed(found and _decode(found[0]))))
                    database.execute("INSERT OR REPLACE INTO shared (map, key, value) VALUES (?, ?, ?)", row)
                    database.execute(_DROP, (entry[0], entry[0], _KEPT))
        except sqlite3.Error as error:
            self._note(error)
            return False
        return True

    def close(self) -> None:
        self._database.close()

    def _note(self, error: sqlite3.Error) -> None:
        if (more := self._failures.take()) is not None:
            LOG.warning("what the processes of this server share cannot be used (%s)%s", error, more)


class SharedMap(LruCache[Any, Any]):
    """One map of one owner: those methods of a cache that are used of ``Moves`` and by ``CostSums``."""

    def __init__(self, state: SharedState, owner: str, name: str) -> None:
        super().__init__()
        self._state, self._name = state, f"{name} {owner}"

    def __len__(self) -> int:
        return sum(row[0] for row in self._state.run("SELECT count(*) FROM shared WHERE map = ?", self._name))

    def entry(self, key: Any) -> Entry:
        return self._name, _encode(key)

    def get(self, key: Any) -> Any:
        return self._state.get(self.entry(key))

    peek = get

    def items(self) -> list[tuple[Any, Any]]:
        rows = self._state.run("SELECT key, value FROM shared WHERE map = ? ORDER BY at DESC", self._name)
        return [(_decode(key), _decode(value)) for key, value in rows]

    def change(self, key: Any, changed: Callable[[Any], Any]) -> bool:
        return self._state.change({self.entry(key): changed})

    def put(self, key: Any, value: Any, size: int = 0) -> None:
        if self.get(key) != value:
            self.change(key, lambda _: value)

    def pop(self, key: Any) -> None:
        self._state.run("DELETE FROM shared WHERE map = ? AND key = ?", *self.entry(key))


class SharedCosts(CostSums):
    """The sums over the turns of one owner in all processes; ``all`` has those of this process."""

    def __init__(self, state: SharedState, owner: str) -> None:
        make = partial(SharedMap, state, owner)
        super().__init__(make)
        self._state, self._total = state, make(_TOTAL)
        self._unwritten: deque[tuple[str, str, Cost]] = deque(maxlen=_UNWRITTEN)

    @property
    def spent(self) -> Cost:
        return Cost._make(self._total.get("") or Cost())

    def charge(self, root: str, agent: str, cost: Cost) -> None:
        self.all[:] = map(add, self.all, cost)
        self._unwritten.append((root, agent, cost))
        while self._unwritten and self._write(*self._unwritten[0]):
            self._unwritten.popleft()

    def _write(self, root: str, agent: str, cost: Cost) -> bool:
        return self._state.change(
            {
                self._sessions.entry(root): lambda agents: charged(agents or {}, agent, cost),
                self._total.entry(""): lambda sums: [*map(add, sums or Cost(), cost)],
            }
        )


def _charged_owners(state: SharedState) -> list[str]:
    """Return the owners who have a name and sums."""
    rows = state.run("SELECT map FROM shared WHERE map > ? AND map < ?", f"{_TOTAL} ", f"{_TOTAL}!")
    return [name.removeprefix(f"{_TOTAL} ") for (name,) in rows]


def share_state(service: Service, state: SharedState) -> None:
    """Have ``service``, which nobody has asked yet, count and remember in ``state``."""
    service.sessions.share_costs(partial(SharedCosts, state), partial(_charged_owners, state))
    service.keys.share_rates(SharedMap(state, "", "rates").change)
    service.catalog.share_moves(partial(SharedMap, state, name="moves"))
