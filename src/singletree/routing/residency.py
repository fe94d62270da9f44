"""Which sessions the engines' caches have room for, so that the others wait a moment instead of evicting them.

Agent sessions come back every few seconds. Where those that are alive do not fit into the caches, an engine that evicts
what was used longest ago evicts each session just before its next turn, and hit rates fall from nearly all to nearly
nothing, wherever the turns are sent. So the sessions that fit are *resident*: their turns go on at once. A turn of
another session waits until a resident one has been idle for long, for a limited time. When a session outgrows the room,
the one that came last makes room: those that came first end first.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import count

IDLE_SECONDS = 10.0
"""A session without a turn for so long has left its room to others."""
WAIT_SECONDS = 30.0
"""A turn waits at most so long for room."""
_LOOK_SECONDS = 1.0
_SAMPLES = 64


@dataclass(slots=True)
class Mean:
    """The mean of all samples, of which the latest count as if they were 64; None before the first."""

    value: float | None = None
    count: int = 0

    def add(self, sample: float) -> None:
        self.count = min(self.count + 1, _SAMPLES)
        self.value = sample if self.value is None else self.value + (sample - self.value) / self.count


@dataclass(slots=True)
class _Resident:
    place: int
    tokens: int
    came: int
    used: float
    running: int = 0


class Residency:
    """The resident sessions of all engines. Times are seconds of any clock that does not go back.

    Args:
        wait: a turn waits at most so many seconds for room; 0: no turn waits.
    """

    def __init__(self, wait: float = WAIT_SECONDS) -> None:
        self._wait = wait
        self._residents: dict[Hashable, _Resident] = {}
        self._held: dict[int, int] = {}
        self._waiting: dict[Hashable, tuple[tuple[float, ...], float]] = {}
        self._arrivals = count()
        self._looked = 0.0

    def __len__(self) -> int:
        return len(self._residents)

    def place_of(self, session: Hashable) -> int | None:
        """Return the engine at which the session is resident; None where it is not."""
        resident = self._residents.get(session)
        return None if resident is None else resident.place

    def held(self, place: int) -> int:
        """Return how many tokens the resident sessions of an engine take there."""
        return self._held.get(place, 0)

    def with_room(
        self, need: int, rooms: Sequence[int | None], places: Sequence[int], now: float
    ) -> list[int]:
        """Return which of the engines have room for a session that is not resident, as indices.

        Args:
            need: tokens that the engine's cache would have to take.
            rooms: tokens that resident sessions may fill there; None for an engine whose cache is of unknown size.
        """
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._leave_idle(now)
        held = self._held.get
        return [
            at
            for at, (room, place) in enumerate(zip(rooms, places, strict=True))
            if room is None or (taken := held(place, 0)) + need <= room or not taken
        ]

    def waits(
        self, turn: Hashable, rank: tuple[float, ...], now: float, *, has_room: bool, reading: float
    ) -> bool:
        """Tell whether a turn of a session that is not resident has to wait; ask again after a moment.

        Those that wait go on by rank, then in the order in which they came. To read a prompt where there is no room may
        hold up every session, and have another read its own again: no turn waits for longer than that.

        Args:
            reading: how many seconds an engine will need to read the turn's prompt; 0.0 if waiting does not pay.
        """
        limit = min(self._wait, reading * (len(self._residents) + len(self._waiting)))
        place, came = self._waiting.get(turn) or ((*rank, float(next(self._arrivals))), now)
        first = min((other for other, _ in self._waiting.values()), default=place)
        if (has_room and place <= first) or now - came >= limit:
            self._waiting.pop(turn, None)
            return False
        self._waiting[turn] = place, came
        return True

    def gives_up(self, turn: Hashable) -> None:
        self._waiting.pop(turn, None)

    def began(self, session: Hashable, place: int, tokens: int, room: int | None, now: float) -> None:
        """Note that a turn of the session begins at an engine whose cache then holds ``tokens`` more for it."""
        resident = self._residents.get(session)
        if resident is None:
            resident = self._residents[session] = _Resident(place, 0, next(self._arrivals), now)
        self._move(resident, place, tokens)
        resident.running += 1
        resident.used = now
        self._make_room(place, room, session)

    def ended(self, session: Hashable, tokens: int, room: int | None, now: float) -> None:
        """Note that a turn of the session ended; its engine's cache holds ``tokens`` for it."""
        resident = self._residents.get(session)
        if resident is None:
            return
        resident.running = max(0, resident.running - 1)
        resident.used = now
        self._move(resident, resident.place, tokens)
        self._make_room(resident.place, room, session)

    def lost(self, place: int) -> None:
        for session in [name for name, each in self._residents.items() if each.place == place]:
            self._leave(session)

    def _move(self, resident: _Resident, place: int, tokens: int) -> None:
        self._held[resident.place] = self._held.get(resident.place, 0) - resident.tokens
        resident.place, resident.tokens = place, tokens
        self._held[place] = self._held.get(place, 0) + tokens

    def _make_room(self, place: int, room: int | None, keep: Hashable) -> None:
        """Have those leave that came last and have no turn running, until the others fit; but not ``keep``."""
        while room is not None and self._held.get(place, 0) > room:
            others = [
                (each.came, name)
                for name, each in self._residents.items()
                if each.place == place and not each.running and name != keep
            ]
            if not others:
                return
            self._leave(max(others, key=lambda each: each[0])[1])

    def _leave_idle(self, now: float) -> None:
        late = now - IDLE_SECONDS
        gone = [name for name, each in self._residents.items() if not each.running and each.used < late]
        for session in gone:
            self._leave(session)

    def _leave(self, session: Hashable) -> None:
        resident = self._residents.pop(session)
        self._held[resident.place] -= resident.tokens
