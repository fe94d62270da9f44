"""The turn memory: generated turns with the token ids that the model generated.

A harness gives a turn back as JSON: its blocks reordered, its arguments encoded again, its reasoning trimmed or left
out. If it is rendered again, its tokens differ from the first changed character on, and from there on the engine's
prefix cache is lost. So every generated turn is remembered with its token ids. When a conversation comes back,
``recall`` replaces the harness's version of a turn by the generated one, the template decides which parts of it are
kept, and ``splicing`` puts the remembered tokens in the place of the text that was kept.

A turn is recognised by its tool-call ids (only their letters and digits are compared) or by its text. It is used only
if the returned turn is equal to it or an ordered part of it (``is_part_of``): a turn with changed text is rendered as
edited. Ids that the server made are unique. Text and ids that a model wrote, such as ``functions.bash:0``, can occur in
another conversation as well, so there the whole history before the turn must be the same, too. If several turns are
remembered with one history, the capsules that the turn carries decide which one it is; without capsules, all turns
that match must agree.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any, TypeVar

from singletree.conversation import (
    Reasoning,
    Tool,
    ToolCall,
    Turn,
)
from singletree.prompts.replay.generation_prompt import GenerationPrompt
from singletree.prompts.replay.history_digests import HistoryDigests
from singletree.prompts.replay.json_values import canonical_json
from singletree.prompts.replay.turn_comparison import (
    generated_parts,
    is_equivalent_turn,
    normalized_id,
    without_space,
)

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
        history_digest: the digest of the history before it (``HistoryDigests``); empty when all its calls have ids
            that this server made, which are unique.
        ending: the text at the end of a turn of which only the beginning is known (``turn`` and ``token_ids`` are
            that beginning); empty for a whole turn.
        keys: the keys under which it is remembered.
        memo: the last results of ``memoized``, by key.
    """

    turn: Turn
    opening: GenerationPrompt
    token_ids: array[int]
    history_digest: str = ""
    ending: str = ""
    keys: list[str] = field(default_factory=list, compare=False, repr=False)
    memo: dict[Hashable, tuple[Any, Any]] = field(default_factory=dict, compare=False, repr=False)

    def memoized(self, key: Hashable, argument: Any, compute: Callable[[], ResultT]) -> ResultT:
        """Return ``compute()``, or its last result for ``key`` if ``argument`` is equal to the one of that time.

        A conversation brings each turn again and again; the memo saves comparing and parsing it each time.
        """
        last = self.memo.get(key)
        if last is None or last[0] != argument:
            if len(self.memo) >= _MAX_MEMO:
                self.memo.clear()
            last = self.memo[key] = (argument, compute())
        result: ResultT = last[1]
        return result


REASONING_PREFIX = "rs_"
"""Prefix of the ids of reasoning items."""

_ORDINAL_LENGTH = 4
_REASONING_KEY = "reasoning "


def reasoning_id(turn: str, ordinal: int) -> str:
    """Return the id of a reasoning item of the turn with the id ``turn``; ``ordinal`` counts its items from 0."""
    return f"{REASONING_PREFIX}{turn}{ordinal:0{_ORDINAL_LENGTH}x}"


def _reasoning_keys(turn: Turn) -> Iterable[str]:
    """Return the key of each turn to which the ids of the reasoning items in ``turn`` belong."""
    ids = [part.id for part in turn.parts if type(part) is Reasoning]
    return dict.fromkeys(
        [f"{_REASONING_KEY}{id[:-_ORDINAL_LENGTH]}" for id in ids if id.startswith(REASONING_PREFIX)]
    )


@dataclass(eq=False, slots=True)
class _Entry:
    """A remembered turn in the memory, with its size in bytes and the slots in which it is kept."""

    remembered: GeneratedTurn
    size: int
    keys: set[str]


class TurnMemory:
    """Holds generated turns, bounded in bytes. Safe to use from several threads.

    A turn is useless without the turns before it, because the prompt breaks at the first missing one. So the least
    recently used conversation is evicted first, its newest turn before the others: the beginning of a conversation
    is what stays.

    A turn with a history digest can have rivals: other turns with the same key, such as those of another conversation
    that begins alike. Each rival has a slot of its own, whose name is the key and a digest of the turn.

    Args:
        limit: the size in bytes at which turns are evicted.
    """

    waits = False
    """Whether ``refresh`` may wait for another machine, so that it has to run outside the event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_slot: dict[str, _Entry] = {}
        # In the order of eviction; the turns of one conversation stand newest first.
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._rivals: dict[str, list[str]] = {}
        self._incomplete: set[str] = set()  # keys with rivals that were forgotten
        self._certain: set[int] = set()  # turns that are in all their slots, without a rival in any
        self._lock = Lock()
        self.bytes = 0

    def remember(self, remembered: GeneratedTurn, *, behind: Sequence[GeneratedTurn] = ()) -> None:
        """Add a turn, under each of its keys.

        Args:
            behind: the remembered turns before it in its conversation, in order.
        """
        remembered.keys[:] = turn_slots(remembered)
        with self._lock:
            if self._add(remembered):
                self._added(remembered, behind[-1] if behind else None)
            self._use(behind)
            self._make_room()

    def mark_used(self, turns: Sequence[GeneratedTurn]) -> None:
        """Mark turns as used, so that they are evicted after the turns of other conversations.

        A turn that was read from capsules (``CAPSULE_KEY``) is added if it is not in the memory.

        Args:
            turns: the remembered turns of one conversation, in order.
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
        """Return the turn that is remembered under the key ``name``, or None."""
        with self._lock:
            entry = self._by_slot.get(name)
            return None if entry is None else entry.remembered

    def still_remembered(self, found: Mapping[int, GeneratedTurn]) -> Mapping[int, GeneratedTurn]:
        """Return those of ``found`` that are still remembered and that no rival makes ambiguous."""
        with self._lock:
            if self._certain.issuperset(map(id, found.values())):
                return found  # as in most requests; no Python loop runs over the turns
            return {i: known for i, known in found.items() if id(known) in self._certain}

    def knows_any(self, keys: Collection[str]) -> bool:
        """Return whether a turn is remembered under one of ``keys`` (``lookup_keys``)."""
        with self._lock:
            return not (self._by_slot.keys().isdisjoint(keys) and self._rivals.keys().isdisjoint(keys))

    def refresh(self, turns: Sequence[Turn], digests: HistoryDigests) -> None:
        """Hook for subclasses that share their turns with other processes: ``turns`` are about to be looked up.

        Args:
            turns: the turns of a conversation as the client sent them.
            digests: the digests of the history before each of them.
        """

    async def settled(self) -> None:
        """Hook for such subclasses: wait until other processes can find the turns that were added."""

    def _added(self, remembered: GeneratedTurn, behind: GeneratedTurn | None) -> None:
        """Hook for subclasses that store the turns elsewhere, too: a turn was added."""

    def _dropped(self, remembered: GeneratedTurn) -> None:
        """Hook for subclasses: a turn was forgotten."""

    def _restore(self, remembered: GeneratedTurn) -> None:
        """Add a turn of an earlier process; it is evicted after the turns that were restored before it."""
        remembered.keys[:] = turn_slots(remembered)
        with self._lock:
            if not self._add(remembered):
                self._dropped(remembered)
            self._make_room()

    def _add(self, remembered: GeneratedTurn) -> bool:
        size = _size(remembered)
        if size > self._limit or not remembered.keys:
            return False
        before = self._entries.get(id(remembered))
        if before is not None:
            self._drop(before)
        entry = _Entry(remembered, size, set())
        self._entries[id(remembered)] = entry
        self.bytes += size
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
            self.bytes -= entry.size
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
        """Note that a rival under ``key`` was forgotten."""
        self._incomplete.add(key)
        for slot in self._rivals[key]:
            self._certain.discard(id(self._by_slot[slot].remembered))

    def _make_room(self) -> None:
        while self.bytes > self._limit:
            self._drop(next(iter(self._entries.values())))

    def _drop(self, entry: _Entry) -> None:
        for slot in tuple(entry.keys):
            self._leave(slot, entry)

    def find(self, turn: Turn, history_digest: str = "", tools: Sequence[Tool] = ()) -> GeneratedTurn | None:
        """Return the remembered turn that is equal to ``turn``, or None.

        Args:
            turn: a turn as the client sent it back.
            history_digest: the digest of the history before it; empty to search by server ids only.
            tools: tools whose schemas' defaults the client may have filled in.
        """
        accept = partial(is_equivalent_memoized, tools=tools)
        found, is_complete = self.find_candidates(turn, "", accept)
        if not found and history_digest:
            found, is_complete = self.find_candidates(turn, history_digest, accept)
        return resolve_match(turn, found, is_complete)[0]

    def find_candidates(
        self, turn: Turn, history_digest: str, accept: Callable[[Turn, GeneratedTurn], bool]
    ) -> tuple[list[GeneratedTurn], bool]:
        """Return the remembered turns that ``turn`` can be, the latest last.

        Args:
            turn: a turn as the client sent it back.
            history_digest: the digest of the history before it; empty to search by server ids only.
            accept: decides whether the returned turn (first argument) can be the remembered one (second).

        Returns:
            The turns, and whether the search was complete: False if another turn with the same key was forgotten.
        """
        found: dict[int, GeneratedTurn] = {}
        keys = lookup_keys(turn, history_digest)
        with self._lock:
            for key in keys:
                for slot in self._rivals.get(key, ()) if history_digest else (key,):
                    entry = self._by_slot.get(slot)
                    if entry is not None and accept(turn, entry.remembered):
                        found[id(entry.remembered)] = entry.remembered
            return list(found.values()), self._incomplete.isdisjoint(keys)


def turn_slots(remembered: GeneratedTurn) -> list[str]:
    """Return the slots in which a turn is kept. A key made from a server's id has no rivals and is its own slot."""
    keys = lookup_keys(remembered.turn, remembered.history_digest)
    if not remembered.history_digest:
        return keys
    rival = _rival_name(remembered)
    return [key if key.startswith(_REASONING_KEY) else f"{key}\0{rival}" for key in keys]


def _rival_name(remembered: GeneratedTurn) -> str:
    """Return the digest of a turn that tells it from its rivals."""
    digest = hashlib.blake2b(remembered.token_ids.tobytes(), digest_size=12)
    for part in generated_parts(remembered.turn):
        text = part.arguments if isinstance(part, ToolCall) else part.text
        digest.update(b"\0" + text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _key_of(slot: str) -> str:
    """Return the key of ``slot``; empty for a key without rivals, which is its own slot."""
    return slot.rpartition("\0")[0]


def resolve_match(
    turn: Turn, found: Sequence[GeneratedTurn], is_complete: bool = True
) -> tuple[GeneratedTurn | None, bool]:
    """Decide which of the matching turns ``turn`` is.

    If all of them have the same content, it is the latest. If they differ only in their reasoning, and ``turn`` has
    none, it is the latest as well, but its reasoning is uncertain.

    Args:
        turn: a turn as the client sent it back.
        found: the remembered turns that match it, the latest last.
        is_complete: whether no other matching turn was forgotten.

    Returns:
        The remembered turn, or None where they contradict each other; and whether its reasoning is certain.
    """
    if not found:
        return None, False
    latest = found[-1]
    if len(found) == 1 or len({_content(known.turn) for known in found}) == 1:
        is_certain = is_complete or not latest.turn.reasoning.strip() or bool(turn.reasoning.strip())
        return latest, is_certain
    if turn.reasoning.strip() or len({_content(_without_reasoning(known.turn)) for known in found}) > 1:
        return None, False
    return latest, False


def _content(turn: Turn) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"call {part.name}", canonical_json(part.arguments))
        if isinstance(part, ToolCall)
        else (type(part).__name__, without_space(part.text))
        for part in generated_parts(turn)
        if isinstance(part, ToolCall) or part.text.strip()
    )


def _without_reasoning(turn: Turn) -> Turn:
    return replace(turn, parts=tuple(p for p in turn.parts if not isinstance(p, Reasoning)))


def is_equivalent_memoized(turn: Turn, known: GeneratedTurn, tools: Sequence[Tool]) -> bool:
    """Return whether ``turn`` is ``known`` (``is_equivalent_turn``); the result is memoized in ``known``.

    Args:
        turn: a turn as the client sent it back.
        known: the remembered turn.
        tools: tools whose schemas' defaults the client may have filled in.
    """
    # Tools change from request to request, and few turns differ by defaults. So only the comparison without tools is
    # memoized, and it comes first.
    same = known.memoized("returned", turn, partial(is_equivalent_turn, turn, known.turn))
    return same or (bool(tools) and is_equivalent_turn(turn, known.turn, tools))


def _size(remembered: GeneratedTurn) -> int:
    opening = remembered.opening
    generated = sum(
        len(p.arguments) if isinstance(p, ToolCall) else len(p.text) for p in generated_parts(remembered.turn)
    )
    names = sum(len(call.id) + len(call.name) for call in remembered.turn.tool_calls)
    texts = (opening.header, opening.text, opening.since_anchor, opening.anchor_digest)
    prompted = sum(map(len, (*texts, remembered.history_digest)))
    tokens = len(remembered.token_ids) * remembered.token_ids.itemsize
    # Times four: the turn itself, and its texts in the memo as they were last compared and parsed.
    return _ENTRY_BYTES + _KEY_BYTES * len(remembered.keys) + tokens + 4 * (generated + names + prompted)


def lookup_keys(turn: Turn, history_digest: str) -> list[str]:
    """Return the keys under which a turn is remembered.

    They are the id of each call, or its text where it has no calls; and the ids of its reasoning. All keys but those of
    reasoning are bound to the history. Some clients replace ids that have other characters than OpenAI's (OpenClaw on
    Responses replaces ``functions.exec:0``): for them the names of the called tools are a key, too.

    Args:
        turn: the turn as it was generated, or as a client sent it back.
        history_digest: the digest of the history before it; empty for the keys made of server ids only.
    """
    calls = turn.tool_calls
    names = [f"call {id}" for call in calls if (id := normalized_id(call.id))]
    if not names and (text := turn.text).strip():
        names = [f"text {without_space(text)}"]
    if history_digest and calls:
        names.append(f"calls {[call.name for call in calls]}")
    elif history_digest and turn.parts:
        names.append("words")
    return [*_reasoning_keys(turn), *[f"{history_digest} {name}" for name in names]]
