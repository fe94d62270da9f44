"""The turn memory at work: generations taken down, and prompts in which they come back by their own tokens."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, takewhile
from sys import getsizeof

import msgspec

from singletree.conversation import Conversation, Tool, Turn
from singletree.events import Event, FinishReason, ReasoningDelta, fold
from singletree.parsing.family import Family
from singletree.parsing.parser import parse
from singletree.prompts import replay, splicing
from singletree.prompts.added_tokens import strip_guards
from singletree.prompts.beginnings import same_characters, same_items
from singletree.prompts.last_words import behind_last_words, digest_of_words
from singletree.prompts.opening import Opening
from singletree.prompts.replay import Places, Recalled, Remembered, TurnMemory
from singletree.prompts.splicing import Layout, Mark, Spliced
from singletree.prompts.tokenizer import Encoded, Tokenizer
from singletree.server import unsealing
from singletree.server.capsule import Capsules, Span
from singletree.server.catalog import Speech
from singletree.server.identity import CallIds


class Recorder:
    """Takes down one generation; it changes nothing.

    Args:
        opening: how the prompt opened the turn.
        said_before: the turns that it answers, and their ``places``.
        ids: of its calls.
        enders: tokens that end a turn, or that the template prints behind one.
        capsules: seal its reasoning.

    Attributes:
        turn: what was generated, when it is over.
    """

    def __init__(
        self,
        memory: TurnMemory,
        opening: Opening,
        said_before: Sequence[Turn],
        places: Places,
        ids: CallIds,
        enders: Collection[int],
        *,
        capsules: Capsules | None = None,
    ) -> None:
        self._memory = memory
        self._opening = opening
        self._said_before = said_before
        self._places = places
        self._ids = ids
        self._enders = enders
        self._token_ids = array("I")
        self._events: list[Event] = []
        self._capsules = capsules
        self._name = b""
        self._reasons = False
        self._ends: list[int] = []
        self._sealed = self._capsules_made = 0
        self._is_over = False
        self.turn: Turn | None = None

    def take(self, token_ids: Sequence[int], events: list[Event]) -> None:
        """What the engine gave, token by token, and what it said."""
        self._token_ids.extend(token_ids)
        self._events += events
        for event in events:
            if type(event) is not ReasoningDelta:
                if self._reasons:
                    self._end_reasoning()
            elif event.text:
                self._reasons = True

    def _end_reasoning(self) -> None:
        self._reasons = False
        self._ends.append(len(self._token_ids))

    def seal(self, ordinal: int) -> str:
        """The capsule of the span of reasoning with this number, which is over; empty where none can be had.

        To be asked once for each, in their order. The last one of a turn that is over holds all that is left of it.
        """
        if self._capsules is None or ordinal >= len(self._ends):
            return ""
        self._name = self._name or os.urandom(_NAME_BYTES)
        is_last = self._is_over and ordinal == len(self._ends) - 1
        end = len(self._token_ids) if is_last else self._ends[ordinal]
        token_ids = self._token_ids[self._sealed : end]
        span = Span(self._name, self._capsules_made, is_last, self._opening, token_ids)
        self._sealed, self._capsules_made = end, self._capsules_made + 1
        return self._capsules.seal(span)

    @property
    def tokens(self) -> int:
        """How many tokens the turn has; the one that ended it does not count when it is over."""
        return len(self._token_ids)

    def close(self, reason: FinishReason) -> None:
        """Remember the turn, unless its tokens go on where its words end."""
        if reason == "stop_sequence" or not self._token_ids:
            return
        while self._token_ids and self._token_ids[-1] in self._enders:
            self._token_ids.pop()
        if self._reasons:
            self._end_reasoning()
        self._is_over = True
        turn = self.turn = fold(self._events)
        if turn.parts and self._token_ids:
            known_by_id = any(call.id in self._ids.made for call in turn.tool_calls)
            place = "" if known_by_id else self._places[len(self._said_before)]
            self._memory.remember(Remembered(turn, self._opening, self._token_ids, place))


def recorder(
    speech: Speech,
    prompt: str,
    said_before: Sequence[Turn],
    places: Places,
    ids: CallIds,
    *,
    clock: float = 0.0,
) -> Recorder | None:
    """A recorder for the turn that ``prompt`` opens; None where its turns cannot be told apart later, and where a
    turn of the client's is continued: that one is not the model's.

    Args:
        clock: the time that the prompt shows, in unix seconds; 0 where it shows none.
    """
    memory, layout = speech.memory, speech.layout
    if memory is None or layout is None or not said_before or said_before[-1].role == "assistant":
        return None
    opening = _opening(prompt, said_before[-1], layout)
    if opening is None:
        return None
    opening, enders = replace(opening, clock=clock), _enders(speech, layout)
    return Recorder(memory, opening, said_before, places, ids, enders, capsules=speech.capsules)


def _enders(speech: Speech, layout: Layout) -> frozenset[int]:
    """The tokens that end a turn: those at which engines stop, and that with which the template itself ends one."""
    added = speech.tokenizer.added_tokens
    begun = (end[:size] for end in layout.ends for size in range(1, len(end) + 1))
    return speech.tokenizer.stop_token_ids.union(added[text] for text in begun if text in added)


def _opening(prompt: str, answered: Turn, layout: Layout) -> Opening | None:
    """How ``prompt`` opens the turn after ``answered``; None where that is not to be told."""
    behind = behind_last_words(prompt, answered)
    asked = strip_guards(prompt[behind:]) if 0 < behind < len(prompt) <= behind + _LONGEST_ASKED else ""
    at, header = layout.last_header(prompt, behind)
    answers = digest_of_words(answered) if asked else ""
    if at < 0 and asked:
        return Opening(asked=asked, answers=answers)
    is_behind = behind > 0 and at >= 0
    if not is_behind:
        at, header = layout.last_header(prompt)
    text = strip_guards(prompt[at:])
    # Where a template writes no header, the one that is found belongs to an earlier turn.
    is_earlier = not is_behind and any(end in text for end in layout.ends)
    if at < 0 or is_earlier or len(text) > _LONGEST_TEXT:
        return None
    return Opening(header, text, asked, answers)


_LONGEST_TEXT, _LONGEST_ASKED = 64, 256
_NAME_BYTES = 8


def recalled(
    speech: Speech, conversation: Conversation, *, restore_reasoning: bool, before: Recalled | None = None
) -> Recalled:
    """``conversation`` with its turns as they were said, where they are remembered or come in their capsules.

    Raises:
        InvalidRequest: a capsule was changed, and such are refused.
    """
    if speech.capsules is not None and speech.capsules.strict:
        unsealing.refuse_tampered(speech.capsules, conversation)
    if speech.memory is None:
        return Recalled(conversation, {})
    opened = partial(unsealing.opened, speech, conversation.tools)
    return replay.recall(
        speech.memory, conversation, restore_reasoning=restore_reasoning, opened=opened, before=before
    )


@dataclass(frozen=True, slots=True)
class Spelled:
    """A rendered prompt and its tokens.

    Attributes:
        replayed: how many of its turns came back by their own tokens.
        reads: what it was read back with (``Reading.key``).
        marks: places from which a longer prompt can go on, and how many tokens stand before each.
        tail: the text behind the last of those turns.
    """

    text: str
    known: Recalled
    token_ids: array[int]
    replayed: int
    reads: Hashable
    marks: list[tuple[Mark, int]]
    tail: Encoded

    @property
    def bytes(self) -> int:
        """About what it costs."""
        marks = _MARK_BYTES * (len(self.marks) + len(self.tail.ends))
        return sum(map(getsizeof, (self.text, self.token_ids, self.tail.text, self.tail.token_ids))) + marks


_MARK_BYTES = 200


def spell(
    tokenizer: Tokenizer,
    family: Family,
    layout: Layout | None,
    text: str,
    known: Recalled,
    before: Spelled | None = None,
) -> Spelled:
    """The tokens of a rendered prompt; of what it has in common with ``before`` they are taken from there."""
    read = Reading.of(family, known.conversation.tools)
    marks = _common_marks(before, text, known) if before and before.reads == read.key else []
    begin, tokens = marks[-1] if marks else (Mark(), 0)
    if layout is None or not known.turns:
        spliced = Spliced([text[begin.done :]], [])
    else:
        turns = known.conversation.turns
        spliced = splicing.splice(text, turns, known.turns, layout, read, guard=tokenizer.guard, begin=begin)
    *pieces, last = spliced.pieces
    token_ids = before.token_ids[:tokens] if before else array("I")
    counts = [tokens]
    for piece in pieces:
        token_ids.extend(tokenizer.encode_array(piece) if isinstance(piece, str) else piece)
        counts.append(len(token_ids))
    assert isinstance(last, str)
    tail = tokenizer.encode_on(last, before.tail if before else None)
    token_ids.extend(tail.token_ids)
    marks += [(mark, counts[mark.pieces - begin.pieces]) for mark in spliced.marks]
    return Spelled(text, known, token_ids, (begin.pieces + len(pieces)) // 2, read.key, marks, tail)


def _common_marks(before: Spelled, text: str, known: Recalled) -> list[tuple[Mark, int]]:
    """The marks of ``before`` up to which the prompt of ``known`` is the same."""
    one, other = before.known, known
    turns = same_items(one.conversation.turns, other.conversation.turns)
    differs = (i for i in range(turns) if one.turns.get(i) is not other.turns.get(i))
    turns = next(differs, turns)
    characters = same_characters(before.text, text)
    usable = (mark.turn <= turns and mark.reach <= characters for mark, _ in before.marks)
    return list(compress(before.marks, takewhile(bool, usable)))


@dataclass(frozen=True, slots=True)
class Reading:
    """Reads printed turns back. Those of one ``key`` read alike: by the same family, with the same tools."""

    family: Family
    tools: Sequence[Tool]
    key: tuple[int, bytes]

    @classmethod
    def of(cls, family: Family, tools: Sequence[Tool]) -> Reading:
        """One for ``tools`` as a client sent them."""
        told = msgspec.json.encode([(tool.name, tool.parameters, tool.kind, tool.strict) for tool in tools])
        return cls(family, tools, (id(family), hashlib.blake2b(told, digest_size=16).digest()))

    def __call__(self, text: str, opened: str) -> Turn:
        """What ``text`` says, behind what the prompt ``opened`` before it."""
        return parse(self.family, strip_guards(text), self.tools, opened)
