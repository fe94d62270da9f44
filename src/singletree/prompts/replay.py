"""Turn memory: earlier turns by the very tokens in which the model wrote them.

A harness gives a turn back as JSON: its blocks reordered, its arguments re-serialised, its reasoning trimmed or left
out. Rendered again, its tokens differ from the first one that was respelled, and the engine's cache is lost from
there on. So every generated turn is remembered with its token ids; when a conversation comes back, ``recall``
puts the turn as it was said in place of what the harness made of it, the template decides what of it is kept, and
``splicing`` spells what is kept in the remembered tokens.

A turn is recognised by its tool-call ids (compared without what is not a letter or digit) or by its words, and taken
only if what came back says the same: an edited turn is rendered as edited. Ids that the server made are nobody
else's. What a model wrote, an id such as ``functions.bash:0`` included, another conversation may hold as well, so
there all that was said before the turn must be the same, too.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any, TypeVar

from singletree.conversation import (
    Conversation,
    Document,
    Image,
    Reasoning,
    Text,
    Tool,
    ToolCall,
    ToolResult,
    Turn,
)
from singletree.prompts.beginnings import is_same_turn, same_items
from singletree.prompts.filled_in import schema_of, without_defaults
from singletree.prompts.opening import Opening

T = TypeVar("T")

_NO_LETTER = re.compile(r"[^0-9A-Za-z]+")
_SPACE = re.compile(r"\s+")
_ASKERS = 8
_ENTRY_BYTES = 400
"""What a remembered turn costs beside its tokens and its text."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """One generated turn.

    Attributes:
        turn: what it said, in the model's order.
        opening: how the prompt opened it.
        token_ids: the tokens that were generated, without the one that ended the turn.
        place: where it was said (``Places``); empty when the id of one of its calls is nobody else's.
        last_words: where only the beginning of a turn is known (``turn`` and ``token_ids`` are that), what it ends in.
        keys: under which it is remembered.
        answers: the last ones, by who asked: a conversation brings each turn again and again, and none is to be
            compared or read twice.
    """

    turn: Turn
    opening: Opening
    token_ids: array[int]
    place: str = ""
    last_words: str = ""
    keys: list[str] = field(default_factory=list, compare=False, repr=False)
    answers: dict[Hashable, tuple[Any, Any]] = field(default_factory=dict, compare=False, repr=False)

    def answered(self, by: Hashable, about: Any, answer: Callable[[], T]) -> T:
        """``answer()``, or what it was when ``by`` last asked about the same."""
        before = self.answers.get(by)
        if before is None or before[0] != about:
            if len(self.answers) >= _ASKERS:
                self.answers.clear()
            before = self.answers[by] = (about, answer())
        found: T = before[1]
        return found


class TurnMemory:
    """Generated turns, least recently used out first, bounded in bytes. Safe to use from several threads."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._turns: OrderedDict[str, tuple[Remembered, int]] = OrderedDict()
        self._lock = Lock()
        self.bytes = 0

    def remember(self, remembered: Remembered, name: str = "") -> None:
        """Keep one more turn, under ``name`` alone or under each of its names."""
        keys = [name] if name else _keys(remembered.turn, remembered.place)
        remembered.keys[:] = keys
        size = _size(remembered)
        with self._lock:
            for key in keys:
                self._forget(key)
                self._turns[key] = remembered, size
                self.bytes += size
            while self.bytes > self._limit:
                self._forget(next(iter(self._turns)))

    def named(self, name: str) -> Remembered | None:
        """What was remembered under ``name``."""
        with self._lock:
            known = self._turns.get(name)
            if known is None:
                return None
            self._turns.move_to_end(name)
            return known[0]

    def still(self, found: Mapping[int, Remembered]) -> dict[int, Remembered]:
        """Those of ``found`` that are remembered yet, with no later turn in their place. They are in use again."""
        with self._lock:
            kept = {i: known for i, known in found.items() if all(map(partial(self._has, known), known.keys))}
            for known in kept.values():
                for key in known.keys:
                    self._turns.move_to_end(key)
        return kept

    def _has(self, known: Remembered, key: str) -> bool:
        return key in self._turns and self._turns[key][0] is known

    def _forget(self, key: str) -> None:
        known = self._turns.pop(key, None)
        if known is not None:
            self.bytes -= known[1]

    def find(self, turn: Turn, place: str = "", tools: Sequence[Tool] = ()) -> Remembered | None:
        """The remembered turn that ``turn``, said at ``place``, gives back, if it says the same."""
        with self._lock:
            for key in (*_keys(turn, ""), *_keys(turn, place)):
                known = self._turns.get(key)
                if known is not None and _returns(turn, known[0], tools):
                    self._turns.move_to_end(key)
                    return known[0]
        return None


def _returns(turn: Turn, known: Remembered, tools: Sequence[Tool]) -> bool:
    # Tools change from request to request, and few turns come back in words that only their schemas explain.
    same = known.answered("returned", turn, partial(says_the_same, turn, known.turn))
    return same or (bool(tools) and says_the_same(turn, known.turn, tools))


def _size(remembered: Remembered) -> int:
    said = sum(len(p.arguments) if isinstance(p, ToolCall) else len(p.text) for p in spoken(remembered.turn))
    # The turn itself, and its words as they were last compared and read.
    return _ENTRY_BYTES + len(remembered.token_ids) * remembered.token_ids.itemsize + 4 * said


def spoken(turn: Turn) -> list[Text | Reasoning | ToolCall]:
    """The parts of ``turn`` that a model says."""
    return [p for p in turn.parts if isinstance(p, Text | Reasoning | ToolCall)]


def _keys(turn: Turn, place: str) -> list[str]:
    """What a turn said at ``place`` is known by: each of its calls, or its words when it made none.

    Some clients give calls ids of their own where a model's have other characters than OpenAI's (OpenClaw on Responses,
    of ``functions.exec:0``): there it is which tools were called.
    """
    names = [f"call {letters(c.id)}" for c in turn.tool_calls if letters(c.id)]
    if not names and turn.text.strip():
        names = [f"text {_words(turn.text)}"]
    if place and turn.tool_calls:
        names.append(f"calls {[c.name for c in turn.tool_calls]}")
    return [f"{place} {name}" for name in names]


class Places:
    """For each of ``turns`` a digest of all that was said before it, and one of all.

    White space and reasoning do not count: harnesses trim the one and leave out the other. Nothing is made before it
    is asked for, and what ``before`` has of the same turns is not made again.
    """

    def __init__(self, turns: Sequence[Turn], before: Places | None = None) -> None:
        self._turns = turns
        # One that was never asked made nothing: what it goes on from stands for it.
        self._before: Places | None = before and (before._before or before)
        self._digests = [hashlib.blake2b(digest_size=16)]

    def __getitem__(self, turn: int) -> str:
        """Of all before ``turn``."""
        if self._before is not None:
            before, self._before = self._before, None
            same = min(same_items(before._turns, self._turns), len(before._digests) - 1)
            self._digests = before._digests[: same + 1]
        for said in self._turns[len(self._digests) - 1 : turn]:
            digest = self._digests[-1].copy()
            for word in (said.role, *_telling(said.parts)):
                digest.update(word.encode("utf-8", "surrogatepass") + b"\0")
            self._digests.append(digest)
        return self._digests[turn].hexdigest()


def _telling(parts: Iterable[Any]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, Text):
            yield _words(part.text)
        elif isinstance(part, ToolCall):
            yield letters(part.id)
        elif isinstance(part, ToolResult):
            yield letters(part.call_id)
            yield from _telling(part.parts)
        elif isinstance(part, Image | Document):
            yield part.data or part.url


def letters(text: str) -> str:
    """What every harness leaves of the id ``text``."""
    return _NO_LETTER.sub("", text)


def _words(text: str) -> str:
    """``text`` without white space: what a client may trim and join."""
    return "".join(text.split())


def says_the_same(returned: Turn, remembered: Turn, tools: Sequence[Tool] = ()) -> bool:
    """Whether ``returned`` is ``remembered`` up to what harnesses are known to do to a turn.

    They move blocks, trim and join reasoning or leave it out, write arguments as JSON of their own, and fill in
    the defaults of the schemas of ``tools``.
    """
    spans = [p.text for p in remembered.parts if isinstance(p, Text)]
    thoughts = [p.text for p in remembered.parts if isinstance(p, Reasoning)]
    if not _is_made_of(returned.text, spans):
        return False
    if returned.reasoning.strip() and not _is_made_of(returned.reasoning, thoughts):
        return False
    calls = _paired(returned, remembered)
    return calls is not None and all(_calls_the_same(theirs, ours, tools) for ours, theirs in calls)


def _paired(returned: Turn, remembered: Turn) -> list[tuple[ToolCall, ToolCall]] | None:
    """Each call as it was said and as it came back: by id, or by their order when all ids are others; else None."""
    if len(returned.tool_calls) != len(remembered.tool_calls):
        return None
    theirs = {letters(c.id): c for c in returned.tool_calls}
    ours = {letters(c.id): c for c in remembered.tool_calls}
    if ours.keys() == theirs.keys():
        return [(call, theirs[letters(call.id)]) for call in remembered.tool_calls]
    if ours.keys() & theirs.keys():
        return None
    return list(zip(remembered.tool_calls, returned.tool_calls, strict=True))


def _calls_the_same(returned: ToolCall, said: ToolCall, tools: Sequence[Tool]) -> bool:
    if returned.name != said.name:
        return False
    ours, theirs = canonical(said.arguments), canonical(returned.arguments)
    schema = None if ours == theirs else schema_of(said.name, tools)
    if schema is None:
        return ours == theirs
    # What is not JSON came back as it was, or is another text.
    return canonical(theirs, lambda value: without_defaults(value, _read(ours), schema)) == ours


def _read(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return None


def _is_made_of(text: str, spans: Sequence[str]) -> bool:
    end = end_of(text, spans)
    return end >= 0 and _skip_space(text, end) == len(text)


def end_of(text: str, spans: Sequence[str]) -> int:
    """Where ``spans``, put together with or without the white space at their edges, end in ``text``; -1 where it does
    not begin with them.
    """
    at = 0
    for span in map(str.strip, spans):
        at = _skip_space(text, at)
        if not text.startswith(span, at):
            return -1
        at += len(span)
    return at


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


@dataclass(frozen=True, slots=True)
class Recalled:
    """A conversation with its remembered turns as they were said, and which they are by position.

    Attributes:
        given: the turns as they came, and their ``places``.
        restored: whether reasoning was given back, and from which turn on.
    """

    conversation: Conversation
    turns: dict[int, Remembered]
    given: tuple[Turn, ...] = ()
    places: Places = field(default_factory=lambda: Places(()))
    restored: tuple[bool, int] = (False, 0)


Open = Callable[[Turn], tuple[Turn, Remembered] | None]
"""A turn that is not remembered -> as it was said and what is known of its tokens, by what it carries itself."""


def recall(
    memory: TurnMemory,
    conversation: Conversation,
    *,
    restore_reasoning: bool = True,
    opened: Open | None = None,
    before: Recalled | None = None,
) -> Recalled:
    """Put remembered turns in place of what came back.

    Args:
        before: what was recalled of an earlier prompt by the same memory: what was found there is found again.
        restore_reasoning: give a turn of the current tool loop its reasoning back when the harness carries none
            (models trained on it lose whole points without it).
    """
    loop, tools = _loop_start(conversation.turns), conversation.tools
    restored = (restore_reasoning, loop)
    turns = list(conversation.turns)
    found = _found_before(memory, before, conversation, restored) if before is not None else {}
    places = Places(conversation.turns, before.places if before is not None else None)
    for i, turn in enumerate(conversation.turns):
        if turn.role != "assistant":
            continue
        if before is not None and i in found:
            turns[i] = before.conversation.turns[i]
            continue
        known = memory.find(turn, tools=tools)
        if known is None:
            # Only turns without an id of ours need to know what was said before them, which is long.
            known = memory.find(turn, places[i], tools)
        if known is not None:
            found[i] = known
            keeps = _carries_any(turn) or (restore_reasoning and i >= loop)
            turns[i] = known.answered(keeps, turn, partial(_as_said, turn, known.turn, keeps_reasoning=keeps))
        elif opened is not None and (sealed := opened(turn)) is not None:
            turns[i], found[i] = sealed
    changed = replace(conversation, turns=tuple(turns)) if found else conversation
    return Recalled(changed, found, conversation.turns, places, restored)


def _found_before(
    memory: TurnMemory, before: Recalled, conversation: Conversation, restored: tuple[bool, int]
) -> dict[int, Remembered]:
    """What was found of the turns that are the same now, and of which as much is to be given back."""
    same = same_items(before.given, conversation.turns, is_same_turn)
    if before.restored[0] != restored[0] or before.conversation.tools != conversation.tools:
        return {}
    if before.restored != restored:
        same = min(same, before.restored[1], restored[1])
    return memory.still({i: known for i, known in before.turns.items() if i < same})


def _loop_start(turns: Sequence[Turn]) -> int:
    """Where the current tool loop begins: behind the last turn of the user."""
    return next((i + 1 for i in range(len(turns) - 1, -1, -1) if turns[i].role == "user"), 0)


def _carries_any(turn: Turn) -> bool:
    """Whether ``turn`` brings reasoning: as text, or sealed with none."""
    return any(isinstance(p, Reasoning) for p in turn.parts)


def _as_said(returned: Turn, remembered: Turn, *, keeps_reasoning: bool) -> Turn:
    """The remembered parts in their order, the calls under the ids by which the results know them."""
    ids = {ours.id: theirs.id for ours, theirs in _paired(returned, remembered) or ()}
    parts = [
        replace(p, id=ids[p.id]) if isinstance(p, ToolCall) else p
        for p in remembered.parts
        if keeps_reasoning or not isinstance(p, Reasoning)
    ]
    return replace(returned, parts=tuple(parts))


def canonical(arguments: str, change: Callable[[Any], Any] = lambda value: value) -> str:
    """``arguments`` whatever their spelling. To JavaScript, and so to many harnesses, 3 and 3.0 are one number."""
    try:
        return json.dumps(change(json.loads(arguments or "{}", parse_int=float)), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
