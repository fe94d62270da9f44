"""A turn memory that several processes share, so that a turn is exact whichever process answers.

Each process keeps turns of its own, and a store holds those of all. Before a conversation is compared with the memory,
its turns are looked up in the store: those with an id of a server only if they are not known here, because such an id
belongs to one turn; the others always, because another process may have generated a rival of theirs. A turn is in the
store before its client gets the end of the answer.

The store must never stop a turn. An access has a bounded time; after a failure the store is left alone for some
seconds, turns are recalled from what this process knows and from the capsules that clients carry, and what was
generated is stored when the store answers again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from typing import TypeVar

from prometheus_client import Counter

from singletree.conversation import Turn
from singletree.prompts.replay.history_digests import HistoryDigests
from singletree.prompts.replay.turn_memory import (
    CAPSULE_KEY,
    GeneratedTurn,
    TurnMemory,
    lookup_keys,
    turn_slots,
)
from singletree.server.models.capsule import Capsules
from singletree.server.models.turn_journal import open_turn, seal_turn
from singletree.server.models.turn_store import NAME_BYTES, StoredTurn, StoreUnavailable, TurnStore

LOG = logging.getLogger(__name__)

T = TypeVar("T")

STORE_FAILURES = Counter(
    "singletree_turn_store_failures",
    "Accesses to the shared turn memory that failed or took too long. The turns were served without it.",
    ["access"],
    registry=None,
)
"""The metric of all shared turn memories of this process."""

_PAUSE_SECONDS = 5.0
"""How long the store is left alone after a failure."""

_SETTLE_SECONDS = 0.5
"""How long the end of an answer waits until its turn is stored."""

_WAITING_TURNS = 1000
"""How many turns are kept for a store that does not answer; the oldest are dropped first."""

_CLOSING_SECONDS = 5.0

_KEY = b"singletree turn key 1"


class SharedTurnMemory(TurnMemory):
    """A ``TurnMemory`` whose turns are shared with other processes by a store.

    Args:
        limit: largest size of the turns in this process, in bytes.
        store: holds the turns of all processes.
        capsules: encrypt what is stored; all processes must have the same key.
        now: returns monotonic time in seconds.
    """

    def __init__(
        self,
        limit: int,
        store: TurnStore,
        capsules: Capsules,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(limit)
        self.waits = store.is_remote
        self._store = store
        self._capsules = capsules
        self._now = now
        self._down_until = float("-inf")
        self._known: dict[bytes, GeneratedTurn] = {}
        self._names: dict[int, list[bytes]] = {}
        self._conversations: dict[int, bytes] = {}
        self._unstored: deque[StoredTurn] = deque(maxlen=_WAITING_TURNS)
        self._writer = ThreadPoolExecutor(1, "turn store")
        self._written: Future[None] | None = None
        self._pausing = Lock()

    def refresh(self, turns: Sequence[Turn], digests: HistoryDigests) -> None:
        """Get from the store what other processes know of ``turns``."""
        unknown = {
            i: [key for key in lookup_keys(turn, "") if not key.startswith(" text ")]
            for i, turn in enumerate(turns)
            if turn.role == "assistant" and not self._knows_id(turn)
        }
        if not unknown:
            return
        found = self._look_up({i: keys for i, keys in unknown.items() if keys})
        others = [i for i in unknown if i not in found]
        self._look_up({i: lookup_keys(turns[i], digests[i]) for i in others})

    async def settled(self) -> None:
        """Wait until other processes can find the turns that were added, for half a second at most."""
        written = self._written
        if written is None or written.done():
            return
        _, late = await asyncio.wait({asyncio.wrap_future(written)}, timeout=_SETTLE_SECONDS)
        if late:
            STORE_FAILURES.labels("wait").inc()

    def close(self) -> None:
        """Wait until everything is stored, for 5 seconds at most, and close the store."""
        last = self._writer.submit(self._store.close)
        with suppress(TimeoutError):
            last.result(_CLOSING_SECONDS)
        self._writer.shutdown(wait=False, cancel_futures=True)

    def _knows_id(self, turn: Turn) -> bool:
        with self._lock:
            return any(key in self._by_slot for key in lookup_keys(turn, ""))

    def _added(self, remembered: GeneratedTurn, behind: GeneratedTurn | None) -> None:
        """Store the turn, unless it came from a capsule: then its client brings it to every process."""
        if remembered.keys[0].startswith(CAPSULE_KEY):
            return
        sealed = seal_turn(remembered, self._capsules)
        if not sealed:
            return
        name = hashlib.blake2b(sealed, digest_size=NAME_BYTES).digest()
        conversation = self._conversations.get(id(behind), name)
        self._enter_name(name, conversation, remembered)
        keys = [self._name(key) for key in lookup_keys(remembered.turn, remembered.history_digest)]
        self._written = self._writer.submit(self._write, StoredTurn(name, conversation, sealed, keys))

    def _dropped(self, remembered: GeneratedTurn) -> None:
        self._conversations.pop(id(remembered), None)
        for name in self._names.pop(id(remembered), ()):
            del self._known[name]

    def _enter_name(self, name: bytes, conversation: bytes, known: GeneratedTurn) -> None:
        self._known[name] = known
        self._names.setdefault(id(known), []).append(name)
        self._conversations.setdefault(id(known), conversation)

    def _name(self, key: str) -> bytes:
        return self._capsules.names(key, _KEY)[0]

    def _look_up(self, wanted: Mapping[int, Sequence[str]]) -> set[int]:
        """Add the turns that the store has under the keys ``wanted``, and return for which indices it has some."""
        asked = [
            (i, key, name)
            for i, keys in wanted.items()
            for key in keys
            for name in self._capsules.names(key, _KEY)
        ]
        if not asked:
            return set()
        listed = self._access("read", lambda: self._store.names([name for _, _, name in asked])) or ()
        found = [(i, key, names) for (i, key, _), names in zip(asked, listed, strict=False) if names]
        with self._lock:
            missing = list(dict.fromkeys(n for _, _, names in found for n in names if n not in self._known))
        stored = self._access("read", lambda: self._store.turns(missing)) if missing else {}
        self._add_stored(missing, stored or {})
        with self._lock:
            for _, key, names in found:
                if len(names) > 1:
                    self._sort_rivals(key, [self._known[name] for name in names if name in self._known])
                if stored is not None and key in self._rivals and not self._known.keys() >= set(names):
                    self._lacks_rival(key)  # the store has forgotten it
        return {i for i, _, _ in found}

    def _add_stored(self, names: Sequence[bytes], stored: Mapping[bytes, StoredTurn]) -> None:
        """Add the turns ``names`` in their order, as far as they were ``stored`` and can be decrypted."""
        opened = {name: open_turn(each.sealed, self._capsules) for name, each in stored.items()}
        with self._lock:
            for name in names:
                found = opened.get(name)
                if found is None or name in self._known:
                    continue
                known, _ = found
                known.keys[:] = turn_slots(known)
                slots = [self._by_slot.get(slot) for slot in known.keys]
                if slots and slots[0] is not None and all(slot is slots[0] for slot in slots):
                    # Two processes have generated the same turn: it is one turn under two names.
                    known = slots[0].remembered
                elif not self._add(known):
                    continue
                self._enter_name(name, stored[name].conversation, known)
            self._make_room()

    def _write(self, turn: StoredTurn) -> None:
        self._unstored.append(turn)
        while self._unstored:
            if self._access("write", self._store_first) is None:
                return

    def _store_first(self) -> bool:
        self._store.add(self._unstored[0])
        self._unstored.popleft()
        return True

    def _access(self, access: str, work: Callable[[], T]) -> T | None:
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
            if was_up:
                LOG.warning(
                    "the shared turn memory does not answer (%s); turns of other processes are recalled from capsules"
                    " until it does",
                    error,
                )
            return None
