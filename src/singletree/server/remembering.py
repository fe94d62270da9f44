"""The turn memory at work: generations taken down, and prompts in which they come back by their own tokens."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from functools import partial

from singletree.conversation import Conversation, Tool, Turn
from singletree.events import Event, FinishReason, fold
from singletree.parsing.family import Family
from singletree.parsing.parser import parse
from singletree.prompts import replay
from singletree.prompts.added_tokens import strip_guards
from singletree.prompts.replay import Layout, Recalled, Remembered, TurnMemory
from singletree.prompts.tokenizer import Tokenizer
from singletree.server.catalog import Speech
from singletree.server.identity import CallIds


class Recorder:
    """Takes down one generation; it changes nothing.

    Args:
        opening: what the prompt had opened of the turn, behind the assistant's header.
        said_before: the turns that it answers.
        ids: of its calls.
    """

    def __init__(
        self,
        memory: TurnMemory,
        opening: str,
        said_before: Sequence[Turn],
        ids: CallIds,
        stop_token_ids: Collection[int],
    ) -> None:
        self._memory = memory
        self._opening = opening
        self._said_before = said_before
        self._ids = ids
        self._stop_token_ids = stop_token_ids
        self._token_ids = array("I")
        self._events: list[Event] = []

    def take(self, token_ids: Sequence[int], events: list[Event]) -> None:
        """What the engine gave, and what it said."""
        self._token_ids.extend(token_ids)
        self._events += events

    def close(self, reason: FinishReason) -> None:
        """Remember the turn, unless its tokens go on where its words end."""
        if reason == "stop_sequence" or not self._token_ids:
            return
        if self._token_ids[-1] in self._stop_token_ids:
            self._token_ids.pop()
        turn = fold(self._events)
        if turn.parts and self._token_ids:
            known_by_id = any(call.id in self._ids.made for call in turn.tool_calls)
            *_, place = [""] if known_by_id else replay.places(self._said_before)
            self._memory.remember(Remembered(turn, self._opening, self._token_ids, place))


def recorder(speech: Speech, prompt: str, said_before: Sequence[Turn], ids: CallIds) -> Recorder | None:
    """A recorder for the turn that ``prompt`` opens; None where its turns cannot be told apart later, and where a
    turn of the client's is continued: that one is not the model's.
    """
    memory, layout = speech.memory, speech.layout
    if memory is None or layout is None or not said_before or said_before[-1].role == "assistant":
        return None
    at, _ = layout.last_header(prompt)
    opening = strip_guards(prompt[at:])
    # More than a marker stands there when a turn of the client's is continued: that turn is not the model's.
    if at < 0 or any(end in opening for end in layout.ends) or len(opening) > _LONGEST_OPENING:
        return None
    return Recorder(memory, opening, said_before, ids, speech.tokenizer.stop_token_ids)


_LONGEST_OPENING = 64


def recalled(memory: TurnMemory | None, conversation: Conversation, *, restore_reasoning: bool) -> Recalled:
    """``conversation`` with its remembered turns as they were said."""
    if memory is None:
        return Recalled(conversation, {})
    return replay.recall(memory, conversation, restore_reasoning=restore_reasoning)


def spell(
    tokenizer: Tokenizer, family: Family, layout: Layout | None, text: str, known: Recalled
) -> tuple[list[int], int]:
    """The tokens of a rendered prompt, and how many of its turns came back by their own."""
    if layout is None or not known.turns:
        return tokenizer.encode(text), 0
    read = partial(_read, family, known.conversation.tools)
    pieces = replay.splice(text, known.conversation.turns, known.turns, layout, read)
    token_ids: list[int] = []
    for piece in pieces:
        token_ids.extend(tokenizer.encode(piece) if isinstance(piece, str) else piece)
    return token_ids, sum(not isinstance(piece, str) for piece in pieces)


def _read(family: Family, tools: Sequence[Tool], text: str, opened: str) -> Turn:
    return parse(family, strip_guards(text), tools, opened)
