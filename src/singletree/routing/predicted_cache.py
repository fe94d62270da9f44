"""What an engine's prefix cache holds, predicted from what the engine was sent, and for which sessions it has room.

An engine evicts the blocks that were used longest ago, and of one prompt the last ones first. So the cache is a list of
chains in the order of their last use; eviction shortens the oldest chain from its end.

Agent sessions come back every few seconds. Where those that are alive do not fit into the caches, an engine that evicts
what was used longest ago evicts each session just before its next turn, and hit rates fall from nearly all to nearly
nothing, wherever the turns are sent. So the sessions that fit are *resident*: their turns go on at once. A turn of
another session waits until a resident one has been idle for long, for a limited time. When a session outgrows the room,
the one that came last makes room: those that came first end first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from singletree.routing.block_chain import BlockChain

_SHARED_SETS = 65536


class PrefixIndex:
    """The blocks of all holders."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._sets: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, holder: int, blocks: Iterable[int]) -> None:
        bit = self._one_object(1 << holder)
        holders, before, after = self._holders, 0, bit
        for block in blocks:
            old = holders.setdefault(block, bit)
            if old is not bit and not old & bit:
                if old != before:
                    before, after = old, self._one_object(old | bit)
                holders[block] = after

    def discard(self, holder: int, blocks: Iterable[int]) -> None:
        """Note that ``holder`` does not have the blocks any more, if it had them."""
        bit = 1 << holder
        holders = self._holders
        for block in blocks:
            old = holders.get(block, 0)
            if old == bit:
                del holders[block]
            elif old & bit:
                holders[block] = self._one_object(old & ~bit)

    def __contains__(self, block: int) -> bool:
        return block in self._holders

    def holds(self, holder: int, block: int) -> bool:
        return bool(self._holders.get(block, 0) >> holder & 1)

    def matches(self, chain: Sequence[int]) -> list[tuple[int, int]]:
        """Return how many blocks of ``chain`` the holders have: pairs (holders as bits, blocks).

        The holders of each pair are among those of the pair before, and have more blocks.
        """
        found: list[tuple[int, int]] = []
        get, at, end = self._holders.get, 0, len(chain)
        holders = get(chain[0], 0) if end else 0
        while holders:
            if get(chain[end - 1], 0) & holders == holders:
                found.append((holders, end))
                break
            low, high = at, end - 1  # all of them hold ``low``, not all hold ``high``
            while high - low > 1:
                middle = (low + high) // 2
                if get(chain[middle], 0) & holders == holders:
                    low = middle
                else:
                    high = middle
            found.append((holders, high))
            holders &= get(chain[high], 0)
            at = high
        return found

    def _one_object(self, holders: int) -> int:
        """Return an equal number: mostly one object for all blocks with the same holders."""
        if len(self._sets) >= _SHARED_SETS:
            self._sets.clear()
        return self._sets.setdefault(holders, holders)


def blocks_by_holder(matches: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Return the number of matched blocks for each holder that has any."""
    found: dict[int, int] = {}
    for holders, blocks in matches:
        while holders:
            lowest = holders & -holders
            found[lowest.bit_length() - 1] = blocks
            holders ^= lowest
    return found


_GROWTH = 1.05


@dataclass(slots=True)
class _Held:
    hashes: array[int]
    blocks: int
    used: int


class PredictedCache:
    """One engine's cache.

    Args:
        unit: how many tokens a block has.
        capacity: size of the engine's cache in tokens, as far as it is known.
        fixed: whether the engine reported that size, so that the cache is never larger.

    Attributes:
        blocks: how many different blocks it holds.
    """

    def __init__(self, index: PrefixIndex, holder: int, unit: int, capacity: int, *, fixed: bool) -> None:
        self._index, self._holder, self._unit = index, holder, unit
        self._largest = self._most = max(1, capacity // unit)
        self._fixed = fixed
        self._chains: OrderedDict[int, _Held] = OrderedDict()
        self._owners: dict[int, BlockChain] = {}
        self._shared: dict[int, int] = {}
        self._clock = 0
        self.blocks = 0

    @property
    def capacity(self) -> int:
        """Return the size that the cache is taken to have now, in tokens."""
        return self._most * self._unit

    def state(self, chain: BlockChain) -> tuple[int, int] | None:
        """Return how many blocks of ``chain`` it holds, and when they were used, on its own clock; None for none.

        Blocks that it holds as a part of another chain do not count.
        """
        held = self._chains.get(id(chain))
        return None if held is None else (held.blocks, held.used)

    def use(self, chain: BlockChain) -> None:
        """Note that the engine reads all blocks of ``chain``, and evict what has to go."""
        self._clock += 1
        held = self._chains.get(id(chain))
        if held is None:
            held = self._chains[id(chain)] = _Held(chain.hashes, 0, self._clock)
            self._owners[id(chain)] = chain  # its id is not given to another one
        added = chain.hashes[held.blocks :]
        index, holder, shared = self._index, self._holder, self._shared
        for block in added:
            if index.holds(holder, block):
                shared[block] = shared.get(block, 1) + 1
            else:
                self.blocks += 1
        index.add(holder, added)
        held.blocks, held.used = len(chain.hashes), self._clock
        self._chains.move_to_end(id(chain))
        self._evict(self._most, keep=1)

    def reported(self, used: int | None, predicted: int, cached: int) -> None:
        """Correct the size of the cache by what the engine had of a prompt that it was expected to have.

        Args:
            used: when the chain was used last, by ``state`` before the prompt was sent.
            predicted, cached: how many tokens were expected and were there.
        """
        if cached > predicted + self._unit:
            most = int(self._most * _GROWTH) + 1
            self._most = min(most, self._largest) if self._fixed else most
        elif used is not None and cached + self._unit < predicted:
            # Blocks used at that time are gone, so all that were used before are gone as well.
            while self._chains and next(iter(self._chains.values())).used < used:
                self._drop_oldest()
            self._most = max(self.blocks, 1)

    def restore(self, chain: BlockChain, before: tuple[int, int] | None) -> None:
        """Take back ``use``: the engine did not read the prompt.

        Args:
            before: what ``state`` returned before it.
        """
        if (held := self._chains.get(id(chain))) is not None:
            self._shorten(id(chain), min(held.blocks, before[0] if before else 0))

    def clear(self) -> None:
        while self._chains:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        key = next(iter(self._chains))
        self._shorten(key, 0)

    def _evict(self, most: int, *, keep: int) -> None:
        """Shorten the oldest chains until at most ``most`` blocks are left; never the last ``keep`` chains."""
        while self.blocks > most and len(self._chains) > keep:
            key, held = next(iter(self._chains.items()))
            self._shorten(key, max(0, held.blocks - (self.blocks - most)))

    def _shorten(self, key: int, blocks: int) -> None:
        held, shared, gone = self._chains[key], self._shared, []
        for block in held.hashes[blocks : held.blocks]:
            others = shared.get(block, 1) - 1
            if others == 0:
                gone.append(block)
            elif others == 1:
                del shared[block]
            else:
                shared[block] = others
        self._index.discard(self._holder, gone)
        self.blocks -= len(gone)
        held.blocks = blocks
        if not blocks:
            del self._chains[key], self._owners[key]


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
