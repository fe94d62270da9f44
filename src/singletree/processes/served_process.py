"""One of the processes of a server with ``--workers``, and what the others may ask it.

Its settings come from standard input, which stays open as long as the parent lives. It reports lines of JSON on
standard output: ``line`` for the user, ``loaded``, and ``failed`` with the kind of the error and its ``message``.

What the processes count and remember together (what turns have cost, how often keys ask, where loops were stopped,
which sessions and models were moved) is in one SQLite file in the folder that they share while they run, as the turns
are: who reads finds what another process wrote before. It must never stop a turn: an access has a bounded time, and
costs that cannot be written are written with those of the next turn.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import signal
import sqlite3
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from operator import add
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec

from singletree.conversation import Conversation
from singletree.errors import BadConfiguration, RouteNotFound, SingletreeError
from singletree.lru import LruCache
from singletree.private_files import create_private
from singletree.processes.other_processes import PeerProcesses, Peers
from singletree.prompts.replay.turn_keys import Fingerprint
from singletree.protocols.answer import Frame
from singletree.server.answers.observer import numbered_path
from singletree.server.http.run import run_server
from singletree.server.http.service import Service, inspector_door
from singletree.server.sessions.session_report import summarize
from singletree.server.sessions.sessions import MovedSession
from singletree.server.sessions.step import Cost, CostSums, charged
from singletree.server.settings.config import Config
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


_OUTPUT = 1


def main() -> None:
    """Serve until SIGTERM, or until the parent has died."""
    import uvloop

    config, number = _read_settings()
    logging.basicConfig(
        level=config.log_level.upper(),
        format=f"%(asctime)s %(levelname)s [{number}] %(message)s",
        stream=sys.stderr,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # until the server has its own handler
    try:
        uvloop.run(_serve(config, number))
    except SingletreeError as error:
        _send(failed=type(error).__name__, message=error.message)
        sys.exit(1)


async def _serve(config: Config, number: int) -> None:
    orders: asyncio.Queue[str] = asyncio.Queue()
    Thread(target=_read_orders, args=(asyncio.get_running_loop(), orders), daemon=True).start()

    folder = config.shared_folder
    assert folder is not None

    async def before_listening(service: Service) -> None:
        share_state(service, state)
        peers = Peers(folder, number, config.workers)
        join_processes(service, peers)
        await peers.start()
        _send(loaded="")
        await orders.get()

    with closing(SharedState(folder / "shared.sqlite")) as state:
        await run_server(config, lambda line: _send(line=line), before_listening=before_listening)


def _read_settings() -> tuple[Config, int]:
    length = int.from_bytes(_read_exactly(8), "big")
    config, number = pickle.loads(_read_exactly(length))
    path = config.trace_path
    if path is not None:
        limit = max(1, config.trace_limit // config.workers)
        config = replace(config, trace_path=numbered_path(path, str(number)), trace_limit=limit)
    return config, number


def _read_exactly(length: int) -> bytes:
    """Read from standard input without a buffer: the rest is read by a thread, later."""
    data = b""
    while len(data) < length:
        some = os.read(sys.stdin.fileno(), length - len(data))
        if not some:
            sys.exit(1)
        data += some
    return data


def _read_orders(loop: asyncio.AbstractEventLoop, orders: asyncio.Queue[str]) -> None:
    for line in iter(partial(os.read, sys.stdin.fileno(), 64), b""):
        loop.call_soon_threadsafe(orders.put_nowait, line.decode())
    os.kill(os.getpid(), signal.SIGTERM)


def _send(**message: str) -> None:
    # The parent may be gone: then this process is about to end.
    try:
        os.write(_OUTPUT, json.dumps(message).encode() + b"\n")
    except BrokenPipeError:
        logging.getLogger(__name__).warning("the process that started this one has ended")


def join_processes(service: Service, peers: Peers) -> None:
    """Answer the questions of ``peers`` from ``service``, which asks them from now on."""
    service.others = PeerProcesses(peers, service.place)
    answers: dict[str, Callable[..., Any]] = {
        "starts of a request": lambda service, digest: service.in_flight.starts(digest),
        "cancel a request": lambda service, digest: service.in_flight.cancel(digest),
        "take a session": _take,
        "conversation of a prompt": _conversation,
        "list sessions": lambda service: summarize(service.sessions),
        "report a session": _report,
        "job": partial(_job, peers.number),
        "events of a job": _events,
        "cancel a job": _cancel,
        "drop a job": lambda service, id: service.jobs.drop(id),
    }
    door = inspector_door(service.config)
    if door is not None and service.inspector is not None:
        service.inspector.process = peers.number
        answers.update(door.questions)
    for question, answer in answers.items():
        peers.answer(question, partial(_answer, service, answer))


def _answer(service: Service, answer: Callable[..., Any], owner: str, *arguments: Any) -> Any:
    """Answer a question that another process asks for ``owner``, from what is the owner's here."""
    return answer(service.of(owner), *arguments)


def _take(service: Service, key: str) -> tuple[MovedSession | None, Any]:
    inspector = service.inspector
    return service.sessions.take(key), None if inspector is None else inspector.take_session(key)


def _conversation(service: Service, model: str, messages: tuple[Fingerprint, ...]) -> Conversation | None:
    models = (each for each in service.catalog.models if each.name == model)
    return next((each.kept_conversation(messages) for each in models), None)


def _report(service: Service, key: str) -> bytes | None:
    try:
        return service.session_report(key)
    except RouteNotFound:
        return None


def _job(process: int, service: Service, id: str) -> tuple[int, bytes, bool] | None:
    job = service.jobs.get(id)
    return None if job is None else (process, job.body(), job.is_streamed)


async def _cancel(service: Service, id: str) -> bytes | None:
    job = service.jobs.get(id)
    return None if job is None else await job.cancel()


async def _events(service: Service, id: str, start: int) -> AsyncIterator[list[Frame]]:
    job = service.jobs.get(id)
    if job is not None:
        async for frames in job.events(start):
            yield frames
