"""Turn memory: earlier turns by the very tokens in which the model wrote them.

A harness gives a turn back as JSON: its blocks reordered, its arguments re-serialised, its reasoning trimmed or left
out. Rendered again, its tokens differ from the first one that was respelled, and the engine's cache is lost from
there on. So every generated turn is remembered with its token ids; when a conversation comes back, ``recall``
puts the turn as it was said in place of what the harness made of it, the template decides what of it is kept, and
``splice`` spells what is kept in the remembered tokens.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

from singletree.conversation import Conversation, Document, Image, Reasoning, Text, ToolCall, ToolResult, Turn

Parse = Callable[[str, str], Turn]
"""(text, what the prompt had opened before it) -> the turn that it says."""

_NO_LETTER = re.compile(r"[^0-9A-Za-z]+")
_SPACE = re.compile(r"\s+")
_ENTRY_BYTES = 400
"""What a remembered turn costs beside its tokens and its text."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """One generated turn.

    Attributes:
        turn: what it said, in the model's order.
        opening: what the prompt had opened after the assistant's header, such as ``<think>`` and a line break.
        token_ids: the tokens that were generated, without the one that ended the turn.
        place: where it was said (``places``); empty when the id of one of its calls is nobody else's.
    """

    turn: Turn
    opening: str
    token_ids: array[int]
    place: str = ""


class TurnMemory:
    """Generated turns, least recently used out first, bounded in bytes. Safe to use from several threads."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._turns: OrderedDict[str, tuple[Remembered, int]] = OrderedDict()
        self._lock = Lock()
        self.bytes = 0

    def remember(self, remembered: Remembered) -> None:
        """Keep one more turn, under each of its names."""
        keys = [_key(remembered.place, name) for name in _names(remembered.turn)]
        size = _size(remembered)
        with self._lock:
            for key in keys:
                self._forget(key)
                self._turns[key] = remembered, size
                self.bytes += size
            while self.bytes > self._limit:
                self._forget(next(iter(self._turns)))

    def _forget(self, key: str) -> None:
        known = self._turns.pop(key, None)
        if known is not None:
            self.bytes -= known[1]

    def find(self, turn: Turn, place: str = "") -> Remembered | None:
        """The remembered turn that ``turn``, said at ``place``, gives back, if it says the same."""
        with self._lock:
            names = _names(turn)
            for key in (_key(at, name) for at in ("", place) for name in names):
                known = self._turns.get(key)
                if known is not None and says_the_same(turn, known[0].turn):
                    self._turns.move_to_end(key)
                    return known[0]
        return None


def _size(remembered: Remembered) -> int:
    said = sum(len(p.arguments) if isinstance(p, ToolCall) else len(p.text) for p in _spoken(remembered.turn))
    return _ENTRY_BYTES + len(remembered.token_ids) * remembered.token_ids.itemsize + 2 * said


def _spoken(turn: Turn) -> list[Text | Reasoning | ToolCall]:
    return [p for p in turn.parts if isinstance(p, Text | Reasoning | ToolCall)]


def _names(turn: Turn) -> list[str]:
    """The names of a turn: each of its calls, or its words when it made none."""
    calls = [f"call {_letters(c.id)}" for c in turn.tool_calls if _letters(c.id)]
    return calls or ([f"text {_words(turn.text)}"] if turn.text.strip() else [])


def _key(place: str, name: str) -> str:
    return f"{place} {name}"


def places(turns: Iterable[Turn]) -> Iterator[str]:
    """For each of ``turns`` a digest of all that was said before it, and at last one of all.

    White space and reasoning do not count: harnesses trim the one and leave out the other.
    """
    digest = hashlib.blake2b(digest_size=16)
    for turn in turns:
        yield digest.hexdigest()
        for word in (turn.role, *_telling(turn.parts)):
            digest.update(word.encode("utf-8", "surrogatepass") + b"\0")
    yield digest.hexdigest()


def _telling(parts: Iterable[Any]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, Text):
            yield _words(part.text)
        elif isinstance(part, ToolCall):
            yield _letters(part.id)
        elif isinstance(part, ToolResult):
            yield _letters(part.call_id)
            yield from _telling(part.parts)
        elif isinstance(part, Image | Document):
            yield part.data or part.url


def _letters(text: str) -> str:
    return _NO_LETTER.sub("", text)


def _words(text: str) -> str:
    """``text`` without white space: what a client may trim and join."""
    return "".join(text.split())


def says_the_same(returned: Turn, remembered: Turn) -> bool:
    """Whether ``returned`` is ``remembered`` up to what harnesses are known to do to a turn.

    They move blocks, trim and join reasoning or leave it out, and write arguments as JSON of their own.
    """
    spans = [p.text for p in remembered.parts if isinstance(p, Text)]
    thoughts = [p.text for p in remembered.parts if isinstance(p, Reasoning)]
    if not _is_made_of(returned.text, spans):
        return False
    if returned.reasoning.strip() and not _is_made_of(returned.reasoning, thoughts):
        return False
    ours = {_letters(c.id): c for c in remembered.tool_calls}
    theirs = {_letters(c.id): c for c in returned.tool_calls}
    if ours.keys() != theirs.keys() or len(returned.tool_calls) != len(remembered.tool_calls):
        return False
    return all(
        c.name == theirs[i].name and _canonical(c.arguments) == _canonical(theirs[i].arguments)
        for i, c in ours.items()
    )


def _is_made_of(text: str, spans: Sequence[str]) -> bool:
    """Whether ``text`` is ``spans`` put together, with or without the white space at their edges."""
    at = 0
    for span in map(str.strip, spans):
        at = _skip_space(text, at)
        if not text.startswith(span, at):
            return False
        at += len(span)
    return _skip_space(text, at) == len(text)


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


@dataclass(frozen=True, slots=True)
class Recalled:
    """A conversation with its remembered turns as they were said, and which they are by position."""

    conversation: Conversation
    turns: dict[int, Remembered]


def recall(memory: TurnMemory, conversation: Conversation, *, restore_reasoning: bool = True) -> Recalled:
    """Put remembered turns in place of what came back.

    Args:
        restore_reasoning: give a turn of the current tool loop its reasoning back when the harness carries none
            (models trained on it lose whole points without it).
    """
    turns = list(conversation.turns)
    found: dict[int, Remembered] = {}
    loop = _loop_start(turns)
    for i, (turn, place) in enumerate(zip(conversation.turns, places(conversation.turns), strict=False)):
        known = memory.find(turn, place) if turn.role == "assistant" else None
        if known is None:
            continue
        found[i] = known
        keeps = bool(turn.reasoning.strip()) or (restore_reasoning and i >= loop and not _carries_any(turn))
        turns[i] = _as_said(turn, known.turn, keeps_reasoning=keeps)
    return Recalled(replace(conversation, turns=tuple(turns)) if found else conversation, found)


def _loop_start(turns: Sequence[Turn]) -> int:
    """Where the current tool loop begins: behind the last turn of the user."""
    return next((i + 1 for i in range(len(turns) - 1, -1, -1) if turns[i].role == "user"), 0)


def _carries_any(turn: Turn) -> bool:
    return any(isinstance(p, Reasoning) for p in turn.parts)


def _as_said(returned: Turn, remembered: Turn, *, keeps_reasoning: bool) -> Turn:
    """The remembered parts in their order, the calls under the ids by which the results know them."""
    ids = {_letters(c.id): c.id for c in returned.tool_calls}
    parts = [
        replace(p, id=ids[_letters(p.id)]) if isinstance(p, ToolCall) else p
        for p in remembered.parts
        if keeps_reasoning or not isinstance(p, Reasoning)
    ]
    return replace(returned, parts=tuple(parts))


@dataclass(frozen=True, slots=True)
class Layout:
    """How a template sets an assistant's turn, told by added tokens.

    Attributes:
        headers: what may stand before it. Some templates write none behind a tool's result: the token that ends
            the result stands for it.
        ends: what may end it. Some templates write none: the token that begins what follows stands for it.
    """

    headers: tuple[str, ...]
    ends: tuple[str, ...]

    def last_header(self, text: str, start: int = 0, end: int | None = None) -> tuple[int, str]:
        """Where the last header in ``text`` ends, and which it is; -1 without one."""
        stop = len(text) if end is None else end
        found = ((text.rfind(header, start, stop), header) for header in self.headers)
        return max(((at + len(header), header) for at, header in found if at >= 0), default=(-1, ""))


def splice(
    text: str, turns: Sequence[Turn], recalled: dict[int, Remembered], layout: Layout, parse: Parse
) -> list[str | array[int]]:
    """A rendered prompt as text and, where a turn is kept whole, the tokens in which it was generated.

    A turn is kept whole when what the template printed of it reads as all that the model said. When the assistant's
    turns cannot be told apart in ``text``, all of it stays text.

    Args:
        text: the rendered prompt; its markers that come from clients are guarded, so that the layout's are not theirs.
        turns: the conversation that was rendered.
        recalled: the remembered turns by their position in ``turns``.
    """
    places = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
    segments = _segments(text, layout)
    if turns and turns[-1].role == "assistant" and len(segments) < len(places):
        places.pop()  # left open for the model to go on with
    if len(segments) > len(places):
        segments = _joined(segments, layout, text)
    if len(segments) != len(places):
        return [text]
    pieces: list[str | array[int]] = []
    at = 0
    for place, (header, start, end) in zip(places, segments, strict=True):
        known = recalled.get(place)
        if known is None or not _kept(text[start:end], header, known, parse):
            continue
        pieces += [text[at:start] + known.opening, known.token_ids]
        at = end
    return [*pieces, text[at:]]


def _segments(text: str, layout: Layout) -> list[tuple[str, int, int]]:
    """The header of each finished assistant turn, and where the turn stands behind it.

    An end is certain, a header is not: what stands for one behind a tool's result is none where another result
    follows. So the last one before an end counts.
    """
    found = []
    at = 0
    for end in re.finditer("|".join(map(re.escape, layout.ends)), text):
        start, header = layout.last_header(text, at, end.start())
        if start >= 0:
            found.append((header, start, end.start()))
        at = end.start()
    return found


def _kept(segment: str, header: str, known: Remembered, parse: Parse) -> bool:
    turn = known.turn
    opening = known.opening if segment.startswith(known.opening) else ""
    printed = parse(segment[len(opening) :], header + opening)
    if len(printed.tool_calls) < len(turn.tool_calls):
        # The template writes calls in another format than the model does (a parser chosen by flag).
        return _stands_in(segment, turn)
    return _said(printed) == _said(turn)


def _stands_in(segment: str, turn: Turn) -> bool:
    """Whether all that ``turn`` says, its calls by their names, is found in ``segment`` in its order."""
    at = 0
    for part in _spoken(turn):
        words = part.name if isinstance(part, ToolCall) else part.text.strip()
        found = segment.find(words, at)
        if found < 0:
            return False
        at = found + len(words)
    return True


def _joined(
    segments: Sequence[tuple[str, int, int]], layout: Layout, text: str
) -> list[tuple[str, int, int]]:
    """``segments`` with those as one that follow each other at once: some formats say a turn in several messages."""
    joined: list[tuple[str, int, int]] = []
    for header, start, end in segments:
        before = text[joined[-1][2] : start - len(header)] if joined else ""
        if before in layout.ends:
            first, begin, _ = joined.pop()
            joined.append((first, begin, end))
        else:
            joined.append((header, start, end))
    return joined


def _said(turn: Turn) -> list[Any]:
    """What a turn says: order counts, spelling and white space at the edges do not."""
    said: list[Any] = []
    for part in _spoken(turn):
        if isinstance(part, ToolCall):
            said.append((part.name, _canonical(part.arguments, _trimmed), part.complete))
        elif part.text.strip():
            said.append((type(part).__name__, part.text.strip()))
    return said


def _canonical(arguments: str, change: Callable[[Any], Any] = lambda value: value) -> str:
    """``arguments`` whatever their spelling. To JavaScript, and so to many harnesses, 3 and 3.0 are one number."""
    try:
        return json.dumps(change(json.loads(arguments or "{}", parse_int=float)), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _trimmed(value: Any) -> Any:
    """``value`` without the line breaks at the edges of its strings, which belong to the tags in some formats."""
    if isinstance(value, str):
        return value.strip("\n")
    if isinstance(value, dict):
        return {key: _trimmed(each) for key, each in value.items()}
    return [_trimmed(each) for each in value] if isinstance(value, list) else value
