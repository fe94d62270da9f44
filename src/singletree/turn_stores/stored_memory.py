"""A turn memory over a store: turns survive the end of the process, and several processes may share them.

Each process keeps turns of its own, and a store holds those of all. A process that shares its store with others looks
the turns of a conversation up there before it compares them with its memory: those with an id of a server only if they
are not known here, because such an id belongs to one turn; the others always, because another process may have
generated a rival of theirs. A turn is in the store before its client gets the end of the answer. A process that has a
store of its own reads it once, when it starts (``load``); after that no request waits for the store.

The store must never stop a turn. An access has a bounded time; after a failure the store is left alone for some
seconds, turns are recalled from what this process knows and from the capsules that clients carry, and what was
generated is stored with the next turn after the store answers again, or at the end of the process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from operator import itemgetter
from threading import Lock
from typing import Self, TypeVar

from singletree.conversation import Turn
from singletree.prompts.replay.turn_keys import HistoryDigests, id_keys, place_keys
from singletree.prompts.replay.turn_memory import (
    CAPSULE_KEY,
    GeneratedTurn,
    TurnMemory,
    size_of,
    turn_keys,
    turn_slots,
)
from singletree.server.capsules import Capsules
from singletree.server.settings.api_keys import ApiKeys
from singletree.server.settings.config import Config
from singletree.server.sparse_log import OncePerMinute
from singletree.server.telemetry import STORE_FAILURES
from singletree.turn_stores.redis_store import RedisTurnStore
from singletree.turn_stores.store import (
    NAME_BYTES,
    SqliteTurnStore,
    StoredTurn,
    StoreUnavailable,
    TurnStore,
    open_turn,
    seal_turn,
)

LOG = logging.getLogger(__name__)

T = TypeVar("T")

_PAUSE_SECONDS = 5.0
"""How long the store is left alone after a failure."""

_SETTLE_SECONDS = 0.5
"""How long the end of an answer waits until its turn is stored."""

_WAITING_TURNS = 1000
"""How many turns are kept for a store that does not answer; the oldest are dropped first."""

_CLOSING_SECONDS = 5.0

_KEY = b"singletree turn key 1"


class StoredTurnMemory(TurnMemory):
    """A ``TurnMemory`` whose turns are also in a store.

    Args:
        limit: largest size of the turns in this process, in bytes.
        capsules: encrypt what is stored; all processes must have the same key. Each owner has keys of its own.
        now: returns monotonic time in seconds.
    """

    def __init__(
        self, limit: int, store: TurnStore, capsules: Capsules, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(limit)
        self.waits = store.is_remote
        self._capsules = capsules
        self._access = _Access(store, now)

    def _begin(self) -> None:
        super()._begin()
        self._known: dict[bytes, GeneratedTurn] = {}
        self._names: dict[int, list[bytes]] = {}
        self._conversations: dict[int, bytes] = {}
        self._written: Future[None] | None = None

    def _part(self, owner: str) -> Self:
        part = super()._part(owner)
        # Its names in the store are made with keys of its own, so it asks for nothing of others.
        part._capsules = self._capsules.of(owner)
        return part

    def load(self, stored: Iterable[tuple[int, StoredTurn]], owners: Sequence[str] = ()) -> None:
        """Add the turns that fit, and only write to the store from now on: no other process uses it.

        Args:
            stored: its turns (``SqliteTurnStore.most_needed``).
            owners: whose turns are among them, besides those without an owner.
        """
        self._access.is_shared = False
        memories = [self, *map(self.of, owners)]
        fitting, size = [], 0
        for at, each in stored:
            opened = ((memory, open_turn(each.sealed, memory._capsules)) for memory in memories)
            memory, known = next((pair for pair in opened if pair[1] is not None), (self, None))
            if known is None:
                continue
            known.keys[:] = turn_slots(known)
            if size_of(known) > self._kept.limit:
                continue
            size += size_of(known)
            if size > self._kept.limit:
                break
            fitting.append((at, memory, each, known))
        with self._lock:
            for _, memory, each, known in sorted(fitting, key=itemgetter(0)):
                memory._enter_stored(each, known)
            self._use([known for *_, known in fitting])
        for memory in memories:
            # A key made from an id belongs to one turn; only places have rivals.
            own = [known for _, its_memory, _, known in fitting if its_memory is memory]
            keys = (place_keys(each.turn, each.history_digest) if each.history_digest else () for each in own)
            memory._arrange(memory._listed(dict(enumerate(keys))), is_complete=True)

    def refresh(self, turns: Sequence[Turn], digests: HistoryDigests) -> None:
        if not self._access.is_shared:
            return
        with self._lock:
            unknown = {
                i: id_keys(turn)
                for i, turn in enumerate(turns)
                if turn.role == "assistant" and self._by_slot.keys().isdisjoint(id_keys(turn))
            }
        if not unknown:
            return
        found = self._look_up({i: keys for i, keys in unknown.items() if keys})
        others = [i for i in unknown if i not in found]
        self._look_up({i: place_keys(turns[i], digests[i]) for i in others})

    async def settled(self) -> None:
        """Wait until other processes can find the turns that were added, for half a second at most."""
        written = self._written
        if written is None or written.done() or not self._access.is_shared:
            return
        _, late = await asyncio.wait({asyncio.wrap_future(written)}, timeout=_SETTLE_SECONDS)
        if late:
            STORE_FAILURES.labels("wait").inc()

    def close(self) -> None:
        """Wait until everything is stored, for 5 seconds at most, and close the store."""
        self._access.close()

    def _added(self, remembered: GeneratedTurn, behind: Sequence[GeneratedTurn]) -> None:
        """Store the turn, unless it came from a capsule: then its client brings it to every process."""
        if remembered.keys[0].startswith(CAPSULE_KEY):
            return
        name = os.urandom(NAME_BYTES)
        # A full memory forgets the last turns of a conversation first, so the first ones are asked first.
        before = filter(None, map(self._conversations.get, map(id, behind)))
        conversation = next(before, name)
        self._enter_name(name, conversation, remembered)
        self._written = self._access.write_soon(partial(self._sealed, name, conversation, remembered))

    def _sealed(self, name: bytes, conversation: bytes, known: GeneratedTurn) -> StoredTurn | None:
        sealed = seal_turn(known, self._capsules)
        keys = [self._capsules.names(key, _KEY)[0] for key in turn_keys(known)]
        return StoredTurn(name, conversation, sealed, keys) if sealed else None

    def _dropped(self, remembered: GeneratedTurn) -> None:
        self._conversations.pop(id(remembered), None)
        for name in self._names.pop(id(remembered), ()):
            del self._known[name]

    def _enter_name(self, name: bytes, conversation: bytes, known: GeneratedTurn) -> None:
        self._known[name] = known
        self._names.setdefault(id(known), []).append(name)
        self._conversations.setdefault(id(known), conversation)

    def _look_up(self, wanted: Mapping[int, Sequence[str]]) -> set[int]:
        """Add the turns that the store has under the keys ``wanted``, and return for which indices it has some."""
        found = self._listed(wanted)
        with self._lock:
            missing = list(dict.fromkeys(n for _, _, names in found for n in names if n not in self._known))
        stored = self._access.attempt("read", lambda: self._access.store.turns(missing)) if missing else {}
        self._add_stored(missing, stored or {})
        self._arrange(found, is_complete=stored is not None)
        return {i for i, _, _ in found}

    def _listed(self, wanted: Mapping[int, Sequence[str]]) -> list[tuple[int, str, Sequence[bytes]]]:
        """Return the keys ``wanted`` under which the store has turns, with their index and the names of the turns."""
        asked = [
            (i, key, name)
            for i, keys in wanted.items()
            for key in keys
            for name in self._capsules.names(key, _KEY)
        ]
        if not asked:
            return []
        listed = (
            self._access.attempt("read", lambda: self._access.store.names([name for _, _, name in asked]))
            or ()
        )
        return [(i, key, names) for (i, key, _), names in zip(asked, listed, strict=False) if names]

    def _arrange(self, found: Sequence[tuple[int, str, Sequence[bytes]]], *, is_complete: bool) -> None:
        """Sort the rivals of each key as the store does, and if ``is_complete`` note which keys lack an evicted one."""
        with self._lock:
            for _, key, names in found:
                if len(names) > 1:
                    self._sort_rivals(key, [self._known[name] for name in names if name in self._known])
                if is_complete and key in self._rivals and not self._known.keys() >= set(names):
                    self._lacks_rival(key)

    def _add_stored(self, names: Sequence[bytes], stored: Mapping[bytes, StoredTurn]) -> None:
        """Add the turns ``names`` in their order, as far as they were ``stored`` and can be decrypted."""
        opened = {name: open_turn(each.sealed, self._capsules) for name, each in stored.items()}
        with self._lock:
            for name in names:
                if (known := opened.get(name)) is not None and name not in self._known:
                    known.keys[:] = turn_slots(known)
                    self._enter_stored(stored[name], known)
            self._make_room()

    def _enter_stored(self, stored: StoredTurn, known: GeneratedTurn) -> None:
        slots = [self._by_slot.get(slot) for slot in known.keys]
        if slots and slots[0] is not None and all(slot is slots[0] for slot in slots):
            # Two processes have generated the same turn: it is one turn under two names.
            known = slots[0].remembered
        elif not self._add(known):
            return
        self._enter_name(stored.name, stored.conversation, known)


def open_memory(config: Config, capsules: Capsules) -> TurnMemory:
    """Return the turn memory in the store that ``config`` names: its own file, or one shared with other processes.

    Raises BadConfiguration.
    """
    limit, path, folder = config.turn_memory, config.turn_memory_path, config.shared_folder
    if config.turn_memory_url is not None:
        return StoredTurnMemory(limit, RedisTurnStore(config.turn_memory_url), capsules)
    file = path
    if file is None:
        assert folder is not None, "a store is opened only where the settings name one"
        file = folder / f"turns-{capsules.fingerprint.hex()}.sqlite"
    store = SqliteTurnStore(file, limit, is_durable=path is not None)
    memory = StoredTurnMemory(limit, store, capsules)
    if folder is None:
        with closing(store.most_needed()) as turns:
            memory.load(turns, ApiKeys(config).owners)
    return memory


class _Access:
    """Reads and writes ``store`` for the memories of all owners, and leaves it alone for a while after a failure."""

    def __init__(self, store: TurnStore, now: Callable[[], float]) -> None:
        self.store = store
        self.is_shared = True
        self._now = now
        self._down_until = float("-inf")
        self._unstored: deque[StoredTurn] = deque(maxlen=_WAITING_TURNS)
        self._writer = ThreadPoolExecutor(1, "turn store")
        self._pausing = Lock()
        self._failures = OncePerMinute()

    def close(self) -> None:
        last = self._writer.submit(self._finish)
        with suppress(TimeoutError):
            last.result(_CLOSING_SECONDS)
        self._writer.shutdown(wait=False, cancel_futures=True)

    def _finish(self) -> None:
        # What waits since a failure would be lost.
        self._down_until = float("-inf")
        self._store_waiting()
        self.store.close()

    def write_soon(self, seal: Callable[[], StoredTurn | None]) -> Future[None] | None:
        """Store a turn in the writer's thread; not at all once the memory is closed."""
        try:
            return self._writer.submit(self._write, seal)
        except RuntimeError:
            return None

    def _write(self, seal: Callable[[], StoredTurn | None]) -> None:
        if (turn := seal()) is not None:
            self._unstored.append(turn)
        self._store_waiting()

    def _store_waiting(self) -> None:
        while self._unstored:
            if self.attempt("write", self._store_first) is None:
                return

    def _store_first(self) -> bool:
        self.store.add(self._unstored[0])
        self._unstored.popleft()
        return True

    def attempt(self, access: str, work: Callable[[], T]) -> T | None:
        """Return ``work()``; None if the store fails, or has failed a moment ago."""
        if self._now() < self._down_until:
            return None
        try:
            return work()
        except StoreUnavailable as error:
            STORE_FAILURES.labels(access).inc()
            with self._pausing:
                was_up = self._now() >= self._down_until
                self._down_until = self._now() + _PAUSE_SECONDS
            if was_up and (more := self._failures.take()) is not None:
                LOG.warning(
                    "the store of the turn memory cannot be used (%s); until it can, %snew turns are lost at a"
                    " restart%s",
                    error,
                    "turns of other processes are recalled from capsules, and " if self.is_shared else "",
                    more,
                )
            return None
