"""The turn memory: generated turns with the token ids that the model generated.

A harness gives a turn back as JSON: its blocks reordered, its arguments encoded again, its reasoning trimmed or left
out. If it is rendered again, its tokens differ from the first changed character on, and from there on the engine's
prefix cache is lost. So every generated turn is remembered with its token ids. When a conversation comes back,
``recall`` replaces the harness's version of a turn by the generated one, the template decides which parts of it are
kept, and ``splicing`` puts the remembered tokens in the place of the text that was kept.

A turn is recognised by the ids that the server made for its calls (only their letters and digits are compared), or by
its place: the whole history before it, without ids, and the names of its calls or its text. Clients may give calls
other ids, and ids that a model wrote, such as ``functions.bash:0``, occur in other conversations as well. A turn is
used only if the returned turn is equal to it or an ordered part of it (``is_part_of``): a turn with changed text is
rendered as edited. If several turns are remembered at one place, the capsules that the turn carries decide which one it
is; without capsules, all turns that match must agree.
"""

from __future__ import annotations

import copy
import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from threading import Lock
from typing import Any, Self, TypeVar

from singletree.conversation import Part, Reasoning, Text, Tool, ToolCall, Turn
from singletree.prompts.replay.turn_comparison import (
    canonical_json,
    generated_parts,
    is_equivalent_turn,
    without_reasoning,
    without_space,
    written_text,
)
from singletree.prompts.replay.turn_keys import HistoryDigests, id_keys, place_keys, reasoning_keys


@dataclass(frozen=True, slots=True)
class GenerationPrompt:
    """The end of a prompt, after which a turn was generated. It is carried in capsules with the turn.

    Attributes:
        header: the template's header that opened the turn; empty where none did.
        text: the text after the header, such as ``<think>`` and a line break.
        since_anchor: the whole text between the anchor of the turn before (``turn_places``; its digest is here, too)
            and the first generated token; empty where it is not known.
        clock: the time that the prompt showed, in unix seconds; 0 where it showed none.
    """

    header: str = ""
    text: str = ""
    since_anchor: str = ""
    anchor_digest: str = ""
    clock: float = 0.0

    @property
    def tail(self) -> str:
        return self.header + self.text if self.header else self.since_anchor


ResultT = TypeVar("ResultT")

_MAX_MEMO = 8
_MAX_RIVALS = 8
"""How many turns with the same history and the same key are remembered."""

_ENTRY_BYTES = 400
"""The size of a remembered turn without its tokens and its text, in bytes."""

CAPSULE_KEY = "capsule "
"""Prefix of the key of a turn that was read from capsules. Its client sends it again, so nobody has to store it."""

_KEY_BYTES = 200
"""The size of each key of a remembered turn, in bytes."""


@dataclass(frozen=True, slots=True)
class GeneratedTurn:
    """A generated turn.

    Attributes:
        turn: its parts, in the model's order.
        opening: the end of the prompt after which it was generated.
        token_ids: the tokens that were generated, without the one that ended the turn.
        history_digest: the digest of the history before it (``HistoryDigests``), its place; empty if only ids
            tell which turn it is.
        ending: the text at the end of a turn of which only the beginning is known (``turn`` and ``token_ids`` are
            that beginning); empty for a whole turn.
        has_unique_ids: whether the server made the ids of all its calls, so that each of them names this turn.
    """

    turn: Turn
    opening: GenerationPrompt
    token_ids: array[int]
    history_digest: str = ""
    ending: str = ""
    has_unique_ids: bool = False
    keys: list[str] = field(default_factory=list, compare=False, repr=False)
    memo: dict[Hashable, tuple[Any, Any]] = field(default_factory=dict, compare=False, repr=False)

    def memoized(self, key: Hashable, argument: Any, compute: Callable[[], ResultT]) -> ResultT:
        """Return ``compute()``, or its last result for ``key`` and ``argument``: each turn comes back many times."""
        last = self.memo.get(key)
        if last is None or last[0] != argument:
            if len(self.memo) >= _MAX_MEMO:
                self.memo.clear()
            last = self.memo[key] = (argument, compute())
        result: ResultT = last[1]
        return result


@dataclass(eq=False, slots=True)
class _Entry:
    memory: TurnMemory
    remembered: GeneratedTurn
    size: int
    keys: set[str]


class _Kept:
    """The turns of the memories of all owners. In the order of eviction; those of one conversation newest first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.entries: OrderedDict[int, _Entry] = OrderedDict()
        self.lock = Lock()
        self.bytes = 0


class TurnMemory:
    """Holds generated turns, bounded in bytes. Safe to use from several threads.

    A turn is useless without the turns before it, because the prompt breaks at the first missing one. So the least
    recently used conversation is evicted first, from its end: the beginning of a conversation is what stays.

    A turn can have rivals: other turns with the same place, such as those of another conversation that begins alike.
    Each rival has a slot of its own, whose name is the key and a digest of the turn.
    """

    waits = False
    """Whether ``refresh`` may wait for another machine, so that it has to run outside the event loop."""

    def __init__(self, limit: int) -> None:
        self._kept = _Kept(limit)
        self._lock = self._kept.lock
        self._entries = self._kept.entries
        self._begin()

    def _begin(self) -> None:
        """Set what the memory of each owner has for itself; it has no turns."""
        self._by_slot: dict[str, _Entry] = {}
        self._rivals: dict[str, list[str]] = {}
        self._incomplete: set[str] = set()  # keys with rivals that were forgotten
        self._certain: set[int] = set()  # turns that are in all their slots, without a rival in any
        self._parts: dict[str, Self] = {}

    @property
    def bytes(self) -> int:
        return self._kept.bytes

    def of(self, owner: str) -> Self:
        """Return the memory of one owner, which shares the limit of this one and finds nothing of others."""
        if not owner:
            return self
        part = self._parts.get(owner)
        if part is None:
            part = self._parts.setdefault(owner, self._part(owner))
        return part

    def _part(self, owner: str) -> Self:
        part = copy.copy(self)
        part._begin()
        return part

    def remember(self, remembered: GeneratedTurn, *, behind: Sequence[GeneratedTurn] = ()) -> None:
        """Add a turn, under each of its keys. ``behind`` has the remembered turns before it in its conversation."""
        remembered.keys[:] = turn_slots(remembered)
        with self._lock:
            if self._add(remembered):
                self._added(remembered, behind)
            self._use(behind)
            self._make_room()

    def mark_used(self, turns: Sequence[GeneratedTurn]) -> None:
        """Mark the turns of one conversation, in order, as used: they are evicted after those of other conversations.

        A turn that was read from capsules (``CAPSULE_KEY``) is added if it is not in the memory.
        """
        with self._lock:
            if not all(map(self._entries.__contains__, map(id, turns))):
                for known in turns:
                    key = known.keys[0] if known.keys else ""
                    if key.startswith(CAPSULE_KEY) and key not in self._by_slot:
                        self._add(known)
            self._use(turns)
            self._make_room()

    def get(self, name: str) -> GeneratedTurn | None:
        with self._lock:
            entry = self._by_slot.get(name)
        return None if entry is None else entry.remembered

    def still_remembered(
        self, found: Mapping[int, GeneratedTurn], turns: Sequence[Turn]
    ) -> Mapping[int, GeneratedTurn]:
        """Return those of ``found``, by index in ``turns``, that are still remembered and have no rival."""
        with self._lock:
            if self._certain.issuperset(map(id, found.values())):
                return found  # as in most requests; no Python loop runs over the turns
            return {
                i: known
                for i, known in found.items()
                if id(known) in self._certain or self._is_named(known, turns[i])
            }

    def _is_named(self, known: GeneratedTurn, turn: Turn) -> bool:
        entries = [self._by_slot.get(key) for key in id_keys(turn)]
        return bool(entries) and all(entry is not None and entry.remembered is known for entry in entries)

    def knows_any(self, keys: Collection[str]) -> bool:
        with self._lock:
            return not (self._by_slot.keys().isdisjoint(keys) and self._rivals.keys().isdisjoint(keys))

    def refresh(self, turns: Sequence[Turn], digests: HistoryDigests) -> None:
        """Hook for subclasses that share their turns with other processes: ``turns`` are about to be looked up."""

    def close(self) -> None:
        """Free what the memory holds outside this process; this one holds nothing there."""

    async def settled(self) -> None:
        """Hook for such subclasses: wait until other processes can find the turns that were added."""

    def _added(self, remembered: GeneratedTurn, behind: Sequence[GeneratedTurn]) -> None:
        """Hook for subclasses that store the turns elsewhere, too: a turn was added, after the turns ``behind``."""

    def _dropped(self, remembered: GeneratedTurn) -> None:
        """Hook for subclasses: a turn was forgotten."""

    def _add(self, remembered: GeneratedTurn) -> bool:
        size = size_of(remembered)
        if size > self._kept.limit or not remembered.keys:
            return False
        before = self._entries.get(id(remembered))
        if before is not None:
            before.memory._drop(before)
        entry = _Entry(self, remembered, size, set())
        self._entries[id(remembered)] = entry
        self._kept.bytes += size
        has_rival = [self._enter(slot, entry) for slot in dict.fromkeys(remembered.keys)]
        if not any(has_rival):
            self._certain.add(id(remembered))
        return True

    def _enter(self, slot: str, entry: _Entry) -> bool:
        """Put a turn into ``slot``, as the latest of its rivals, and return whether it has rivals or had any."""
        has_rival = False
        replaced = self._by_slot.get(slot)
        if replaced is not None:
            self._leave(slot, replaced, is_replaced=True)
        key = _key_of(slot)
        if key:
            rivals = self._rivals.setdefault(key, [])
            if len(rivals) >= _MAX_RIVALS:
                self._leave(rivals[0], self._by_slot[rivals[0]])
                rivals = self._rivals.setdefault(key, [])
            rivals.append(slot)
            has_rival = len(rivals) > 1 or key in self._incomplete
            if len(rivals) == 2:
                self._certain.discard(id(self._by_slot[rivals[0]].remembered))
        self._by_slot[slot] = entry
        entry.keys.add(slot)
        return has_rival

    def _leave(self, slot: str, entry: _Entry, *, is_replaced: bool = False) -> None:
        """Take a turn out of ``slot``; a turn without slots is forgotten."""
        del self._by_slot[slot]
        entry.keys.discard(slot)
        self._certain.discard(id(entry.remembered))
        key = _key_of(slot)
        if key:
            rivals = self._rivals[key]
            rivals.remove(slot)
            if not rivals and not is_replaced:
                del self._rivals[key]
                self._incomplete.discard(key)
            elif not is_replaced:
                self._incomplete.add(key)
        if not entry.keys:
            del self._entries[id(entry.remembered)]
            self._kept.bytes -= entry.size
            self._dropped(entry.remembered)

    def _use(self, turns: Sequence[GeneratedTurn]) -> None:
        known = filter(self._entries.__contains__, map(id, reversed(turns)))
        # A conversation has hundreds of turns; a deque without room calls the function for each without a Python loop.
        deque(map(self._entries.move_to_end, known), maxlen=0)

    def _sort_rivals(self, key: str, order: Sequence[GeneratedTurn]) -> None:
        """Put the turns of ``key`` into the order in which they were generated, the latest last."""
        rivals = self._rivals.get(key, [])
        place = {slot: i for i, known in enumerate(order) for slot in known.keys}
        # A turn that is not in ``order`` was generated just now.
        rivals.sort(key=lambda slot: place.get(slot, len(order)))

    def _lacks_rival(self, key: str) -> None:
        self._incomplete.add(key)
        for slot in self._rivals[key]:
            self._certain.discard(id(self._by_slot[slot].remembered))

    def _make_room(self) -> None:
        while self._kept.bytes > self._kept.limit:
            oldest = next(iter(self._entries.values()))
            oldest.memory._drop(oldest)

    def _drop(self, entry: _Entry) -> None:
        for slot in tuple(entry.keys):
            self._leave(slot, entry)

    def find(self, turn: Turn, history_digest: str = "", tools: Sequence[Tool] = ()) -> GeneratedTurn | None:
        """Return the remembered turn that is equal to ``turn``, or None; without ``history_digest`` by ids only."""
        accept = partial(is_equivalent_memoized, tools=tools)
        found, is_complete = self.find_candidates(turn, "", accept)
        if not found and history_digest:
            found, is_complete = self.find_candidates(turn, history_digest, accept)
        return resolve_match(turn, found, is_complete)[0]

    def find_candidates(
        self, turn: Turn, history_digest: str, accept: Callable[[Turn, GeneratedTurn], bool]
    ) -> tuple[list[GeneratedTurn], bool]:
        """Return the remembered turns that the returned ``turn`` can be, the latest last, and whether that is all.

        It is not if another turn with the same key was forgotten. Without ``history_digest``, they are found by ids.
        """
        keys = place_keys(turn, history_digest) if history_digest else id_keys(turn)
        with self._lock:
            slots = chain.from_iterable(
                self._rivals.get(key, ()) if history_digest else (key,) for key in keys
            )
            entries = filter(None, map(self._by_slot.get, slots))
            found = {id(entry.remembered): entry.remembered for entry in entries}
            is_complete = self._incomplete.isdisjoint(keys)
        return [known for known in found.values() if accept(turn, known)], is_complete


def turn_slots(remembered: GeneratedTurn) -> list[str]:
    """Return the slots in which a turn is kept. A key made from an id has no rivals and is its own slot."""
    rival = _rival_name(remembered) if remembered.history_digest else ""
    return [key if is_unique else f"{key}\0{rival}" for key, is_unique in _keys(remembered)]


def turn_keys(remembered: GeneratedTurn) -> list[str]:
    """Return the keys under which a turn is found."""
    return [key for key, _ in _keys(remembered)]


def _keys(remembered: GeneratedTurn) -> Iterator[tuple[str, bool]]:
    """Yield each key of a turn, and whether no other turn can have it."""
    turn, digest = remembered.turn, remembered.history_digest
    for key in id_keys(turn) if remembered.has_unique_ids or not digest else reasoning_keys(turn):
        yield key, True
    for key in place_keys(turn, digest) if digest else ():
        yield key, False


def _rival_name(remembered: GeneratedTurn) -> str:
    """Return the digest of a turn that tells it from its rivals."""
    digest = hashlib.blake2b(remembered.token_ids.tobytes(), digest_size=12)
    for text in map(written_text, generated_parts(remembered.turn)):
        digest.update(b"\0" + text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _key_of(slot: str) -> str:
    """Return the key of ``slot``; empty for a key without rivals, which is its own slot."""
    return slot.rpartition("\0")[0]


def resolve_match(
    turn: Turn, found: Sequence[GeneratedTurn], is_complete: bool = True
) -> tuple[GeneratedTurn | None, bool]:
    """Decide which of the matching turns ``found``, the latest last, the returned ``turn`` is.

    If all of them have the same content, it is the latest. If they differ only in their reasoning, and ``turn`` has
    none, it is the latest as well, but its reasoning is uncertain. None where they contradict each other. The second
    result tells whether its reasoning is certain.
    """
    if not found:
        return None, False
    latest = found[-1]
    if len(found) == 1 or len({_content(known.turn.parts) for known in found}) == 1:
        return latest, is_complete or not latest.turn.reasoning.strip() or bool(turn.reasoning.strip())
    if turn.reasoning.strip() or len({_content(without_reasoning(known.turn.parts)) for known in found}) > 1:
        return None, False
    return latest, False


def _content(parts: Sequence[Part]) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"call {part.name}", canonical_json(part.arguments))
        if isinstance(part, ToolCall)
        else (type(part).__name__, without_space(part.text))
        for part in parts
        if isinstance(part, ToolCall) or (isinstance(part, Text | Reasoning) and part.text.strip())
    )


def is_equivalent_memoized(turn: Turn, known: GeneratedTurn, tools: Sequence[Tool]) -> bool:
    """Return whether ``turn`` is ``known`` (``is_equivalent_turn``); the result is memoized in ``known``."""
    # Tools change from request to request, and few turns differ by defaults. So only the comparison without tools is
    # memoized, and it comes first.
    same = known.memoized("returned", turn, partial(is_equivalent_turn, turn, known.turn))
    return same or (bool(tools) and is_equivalent_turn(turn, known.turn, tools))


def size_of(remembered: GeneratedTurn) -> int:
    """Return about how much memory a turn takes, in bytes; its ``keys`` are known."""
    opening = remembered.opening
    generated = sum(map(len, map(written_text, generated_parts(remembered.turn))))
    names = sum(len(call.id) + len(call.name) for call in remembered.turn.tool_calls)
    texts = (opening.header, opening.text, opening.since_anchor, opening.anchor_digest)
    prompted = sum(map(len, (*texts, remembered.history_digest)))
    tokens = len(remembered.token_ids) * remembered.token_ids.itemsize
    # Times four: the turn itself, and its texts in the memo as they were last compared and parsed.
    return _ENTRY_BYTES + _KEY_BYTES * len(remembered.keys) + tokens + 4 * (generated + names + prompted)
