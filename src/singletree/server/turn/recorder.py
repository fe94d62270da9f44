"""Records generated turns for the turn memory and for capsules."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

from singletree.conversation import Reasoning, Tool, ToolCall, Turn
from singletree.events import FinishReason, fold
from singletree.prompts.replay.anchors import anchor_digest, anchor_end, anchor_of
from singletree.prompts.replay.generation_prompt import GenerationPrompt
from singletree.prompts.replay.history_digests import HistoryDigests
from singletree.prompts.replay.splicing import TurnDelimiters
from singletree.prompts.replay.turn_memory import (
    REASONING_PREFIX,
    GeneratedTurn,
    TurnMemory,
    reasoning_id,
)
from singletree.prompts.tokenizer.added_tokens import PICTURE_MARK, strip_guards
from singletree.server.models.capsule import Capsules, Span
from singletree.server.models.catalog import ChatFormat
from singletree.server.turn.decoder import DecodedTurn
from singletree.server.turn.ids import NewId, TurnCallIds, new_id
from singletree.server.turn.round_trip import survives_round_trip

RoundTripCheck = Callable[[Turn, "array[int]", "array[int] | str", bool], bool]
_JOINT_TOKENS = 16
"""How many tokens before the end of a turn are compared with it."""


class TurnRecorder:
    """Records one generation, for the turn memory and for capsules. It does not change the generation.

    Args:
        memory: gets the turn when it is over.
        opening: how the prompt opened the turn.
        history: the turns before it.
        places: keys of the turns of ``history``, under which the memory finds them.
        ids: the ids of its calls.
        enders: tokens that end a turn, or that the template prints behind one.
        decoded: the turn, as the decoder knows it.
        capsules: encrypt its reasoning for the client; None for no capsules.
        names_reasoning: whether the client gets its reasoning under ids, by which the turn is recognised later.
        survives: called with the finished turn, the tokens at its end, the tokens before those (or the text of the
            prompt) and whether arguments travel as objects; returns whether the tokens at the end come back without
            a capsule.
        behind: the remembered turns of the conversation, in order.

    Attributes:
        turn: the generated turn, when it is over.
    """

    def __init__(
        self,
        memory: TurnMemory,
        opening: GenerationPrompt,
        history: Sequence[Turn],
        places: HistoryDigests,
        ids: TurnCallIds,
        enders: Collection[int],
        decoded: DecodedTurn,
        *,
        capsules: Capsules | None = None,
        names_reasoning: bool = False,
        survives: RoundTripCheck | None = None,
        behind: Sequence[GeneratedTurn] = (),
    ) -> None:
        self._survives = survives
        self._behind = behind
        self._memory = memory
        self._opening = opening
        self._history = history
        self._places = places
        self._ids = ids
        self._enders = enders
        self._decoded = decoded
        self._answer = new_id("") if names_reasoning else ""
        self._capsules = capsules
        self._name = b""
        self._sealed = self._capsules_made = 0
        self._is_over = False
        self.turn: Turn | None = None

    def with_reasoning_ids(self, new_id: NewId) -> NewId:
        """Wrap ``new_id`` so that the ids of reasoning items name this turn; they are numbered in their order."""
        if not self._answer:
            return new_id
        ordinals = count()

        def make(prefix: str) -> str:
            return (
                reasoning_id(self._answer, next(ordinals)) if prefix == REASONING_PREFIX else new_id(prefix)
            )

        return make

    def seal(self, ordinal: int) -> str:
        """Return the capsule of the finished span of reasoning with index ``ordinal``; empty if there is no capsule.

        Call it once for each span, in their order. The capsule of the last span holds all remaining tokens of the turn
        if the turn is over.
        """
        ends = self._decoded.reasoning_ends
        if self._capsules is None or ordinal >= len(ends):
            return ""
        is_last = self._is_over and ordinal == len(ends) - 1
        return self._seal_up_to(self.tokens if is_last else ends[ordinal], is_last=is_last)

    def seal_end(self, *, as_objects: bool) -> str:
        """Return the capsule of the tokens behind the last capsule, for a turn that is over and ends in a call.

        It is empty for other turns, and for tokens that come back without it.

        Args:
            as_objects: whether the protocol carries the arguments of calls as objects.
        """
        if self._capsules is None or self._survives is None or not self._is_over or self.turn is None:
            return ""
        token_ids = self._decoded.token_ids
        last, rest = self.turn.parts[-1:], token_ids[self._sealed : self.tokens]
        ends_in_call = any(isinstance(part, ToolCall) and part.complete for part in last)
        if not rest or not ends_in_call:
            return ""
        sealed = token_ids[max(0, self._sealed - _JOINT_TOKENS) : self._sealed]
        if self._survives(self.turn, rest, sealed or self._opening.tail, as_objects):
            return ""
        return self._seal_up_to(self.tokens, is_last=True)

    def _seal_up_to(self, end: int, *, is_last: bool) -> str:
        assert self._capsules is not None
        self._name = self._name or os.urandom(_NAME_BYTES)
        token_ids = self._decoded.token_ids[self._sealed : end]
        span = Span(self._name, self._capsules_made, is_last, self._opening, token_ids)
        self._sealed, self._capsules_made = end, self._capsules_made + 1
        return self._capsules.seal(span)

    @property
    def tokens(self) -> int:
        """The number of tokens of the turn; once it is over, without the token that ended it."""
        return self._decoded.length

    def close(self, reason: FinishReason) -> None:
        """End the turn and remember it, unless a stop string cut it: then its last token goes on behind its text."""
        decoded = self._decoded
        if reason == "stop_sequence" or not decoded.length:
            return
        while decoded.length and decoded.token_ids[decoded.length - 1] in self._enders:
            decoded.length -= 1
        if decoded.is_reasoning:
            decoded.end_reasoning()
        self._is_over = True
        turn = self.turn = fold(decoded.events)
        if turn.parts and decoded.length:
            calls = turn.tool_calls
            known_by_id = bool(calls) and all(call.id in self._ids.minted for call in calls)
            place = "" if known_by_id else self._places[len(self._history)]
            named = turn if known_by_id or not self._answer else _with_reasoning_ids(turn, self._answer)
            known = GeneratedTurn(named, self._opening, decoded.token_ids[: decoded.length], place)
            self._memory.remember(known, behind=self._behind)


def _with_reasoning_ids(turn: Turn, answer: str) -> Turn:
    ordinals = count()
    return replace(
        turn,
        parts=tuple(
            replace(part, id=reasoning_id(answer, next(ordinals))) if isinstance(part, Reasoning) else part
            for part in turn.parts
        ),
    )


def make_recorder(
    chat_format: ChatFormat,
    prompt: str,
    history: Sequence[Turn],
    places: HistoryDigests,
    ids: TurnCallIds,
    decoded: DecodedTurn,
    *,
    tools: Sequence[Tool] = (),
    behind: Sequence[GeneratedTurn] = (),
    clock: float = 0.0,
    names_reasoning: bool = False,
    stop_token_ids: Collection[int] = (),
) -> TurnRecorder | None:
    """Return a recorder for the turn that ``prompt`` opens.

    Return None if the turns of this template cannot be separated later, and if the client's own assistant turn is
    continued: that turn is not the model's alone.

    Args:
        prompt: the rendered prompt.
        history: the turns of the prompt.
        places: their keys in the turn memory.
        ids: the ids of the calls of the turn.
        decoded: the turn, as the decoder knows it.
        tools: the tools of the conversation.
        behind: the remembered turns of the conversation, in order.
        clock: the time that the prompt prints, in unix seconds; 0 if it prints none.
        names_reasoning: whether the client gets reasoning under ids.
        stop_token_ids: tokens that end this turn in addition to the model's own.
    """
    memory, layout = chat_format.memory, chat_format.layout
    if memory is None or layout is None or not history or history[-1].role == "assistant":
        return None
    opening = _opening(prompt, history[-1], layout)
    if opening is None:
        return None
    if clock != opening.clock:
        opening = replace(opening, clock=clock)
    enders = chat_format.derived(_enders)
    if stop_token_ids:
        enders = enders.union(stop_token_ids)
    return TurnRecorder(
        memory,
        opening,
        history,
        places,
        ids,
        enders,
        decoded,
        capsules=chat_format.capsules,
        names_reasoning=names_reasoning,
        survives=partial(_survives, chat_format, tools),
        behind=behind,
    )


def _survives(
    chat_format: ChatFormat,
    tools: Sequence[Tool],
    turn: Turn,
    rest: array[int],
    before: array[int] | str,
    as_objects: bool,
) -> bool:
    behind = before if isinstance(before, str) else chat_format.tokenizer.decode(before)
    return survives_round_trip(chat_format, turn, rest, behind, tools, as_objects=as_objects)


def _enders(chat_format: ChatFormat) -> frozenset[int]:
    """Return the tokens that end a turn: those at which engines stop, and those that the template ends a turn with."""
    added = chat_format.tokenizer.added_tokens
    ends = () if chat_format.layout is None else chat_format.layout.ends
    begun = (end[:size] for end in ends for size in range(1, len(end) + 1))
    return chat_format.tokenizer.stop_token_ids.union(added[text] for text in begun if text in added)


def _opening(prompt: str, answered: Turn, layout: TurnDelimiters) -> GenerationPrompt | None:
    """Return how ``prompt`` opens the turn after ``answered``; None if that cannot be determined."""
    anchor = anchor_of(answered)
    behind = anchor_end(prompt, anchor)
    asked = strip_guards(prompt[behind:]) if 0 < behind < len(prompt) <= behind + _LONGEST_ASKED else ""
    if PICTURE_MARK in asked:
        asked = ""  # the turn is kept in files, which cannot hold the mark
    at, header = layout.last_header(prompt, behind)
    answers = anchor_digest(anchor) if asked else ""
    if at < 0 and asked:
        return GenerationPrompt(since_anchor=asked, anchor_digest=answers)
    is_behind = behind > 0 and at >= 0
    if not is_behind:
        at, header = layout.last_header(prompt)
    text = strip_guards(prompt[at:])
    # If the template writes no header here, the header that was found belongs to an earlier turn.
    is_earlier = not is_behind and any(end in text for end in layout.ends)
    if at < 0 or is_earlier or len(text) > _LONGEST_TEXT:
        return None
    return GenerationPrompt(header, text, asked, answers)


_LONGEST_TEXT, _LONGEST_ASKED = 64, 256
_NAME_BYTES = 8
