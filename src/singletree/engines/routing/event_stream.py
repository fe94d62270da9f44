"""The messages of one engine's publisher, in order: gaps are noticed and repaired. No I/O."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from singletree.engines.routing.event_cache import EventCache
from singletree.engines.routing.kv_events import END_OF_REPLAY, AllBlocksCleared, decode_batch, read_frames

_LOG = logging.getLogger(__name__)

_MOST_WAITING = 100_000


class EventStream:
    """Feed the messages of a publisher into an ``EventCache``.

    A missing message is asked for again: while ``replay_from`` is set, ask the publisher for all messages from that
    number on and pass them to ``replayed``; live ones, still passed to ``feed``, wait. If the publisher cannot repeat
    a message, what the cache holds is unknown: it is emptied, and fills with the next events.

    Args:
        cache: takes the events.
        name: of the engine, for the log.
        can_replay: whether the publisher repeats messages.

    Attributes:
        replay_from: the number of the first message to ask for; None if none is missing.
        losses: how often messages were lost for good.
    """

    def __init__(self, cache: EventCache, name: str = "", *, can_replay: bool = False) -> None:
        self._cache, self._name, self._can_replay = cache, name, can_replay
        self._waiting: deque[tuple[int, bytes]] = deque()
        self.losses = 0
        self.restart()

    @property
    def synced(self) -> bool:
        """Whether the cache is known completely: every event since it was empty has come."""
        return self._complete and self._seen

    def restart(self) -> None:
        """Begin again: the engine was restarted, its cache is empty and its messages are counted from 0."""
        self._cache.clear()
        self._waiting.clear()
        self._next = 0
        self._complete, self._seen = True, False
        self.replay_from: int | None = 0 if self._can_replay else None

    def feed(self, frames: Sequence[bytes]) -> None:
        """Take a live message."""
        try:
            number, payload = read_frames(frames)
        except ValueError as error:
            _LOG.warning("KV events of %s: %s", self._name, error)
            return
        if self.replay_from is not None:
            self._waiting.append((number, payload))
            if len(self._waiting) > _MOST_WAITING:
                self.replay_failed()
            return
        if number < self._next:
            self.restart()
            self.feed(frames)
        elif number > self._next and self._can_replay:
            self.replay_from = self._next
            self._waiting.append((number, payload))
        else:
            self._apply(number, payload)

    def replayed(self, frames: Sequence[bytes]) -> bool:
        """Take a repeated message; return whether it was the last one."""
        try:
            number, payload = read_frames(frames)
        except ValueError:
            return False
        if number == END_OF_REPLAY:
            self._seen = True
            self._go_on()
            return True
        if number >= self._next:
            self._apply(number, payload)
        return False

    def replay_failed(self) -> None:
        """Note that the publisher does not answer: go on without what is missing."""
        self._go_on()

    def _go_on(self) -> None:
        """Apply the live messages that waited for the end of a replay."""
        self.replay_from = None
        waiting, self._waiting = self._waiting, deque()
        last = -1
        for number, payload in waiting:
            if number <= last:
                self.restart()
                self.replay_from = None
            if number >= self._next:  # the others came with the replay
                self._apply(number, payload)
            last = number

    def _apply(self, number: int, payload: bytes) -> None:
        if number > self._next:
            self.losses += self._seen
            self._complete = False
            self._cache.clear()
        self._next, self._seen = number + 1, True
        try:
            events = decode_batch(payload)
        except ValueError as error:
            _LOG.warning("KV events of %s: message %d: %s", self._name, number, error)
            self._complete = False
            self._cache.clear()
            return
        for event in events:
            self._cache.apply(event)
            self._complete = self._complete or isinstance(event, AllBlocksCleared)
