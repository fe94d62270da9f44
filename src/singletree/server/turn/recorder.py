"""Records generated turns for the turn memory and for capsules."""

from __future__ import annotations

import os
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import count

from singletree.conversation import Part, Reasoning, Tool, Turn
from singletree.events import FinishReason, fold
from singletree.prompts.prompt_writer import Prompt
from singletree.prompts.replay.splicing import comparable_parts
from singletree.prompts.replay.turn_comparison import generated_parts
from singletree.prompts.replay.turn_keys import REASONING_PREFIX, HistoryDigests, reasoning_id
from singletree.prompts.replay.turn_memory import GeneratedTurn, GenerationPrompt
from singletree.prompts.replay.turn_places import TurnDelimiters, anchor_digest, anchor_end, anchor_of
from singletree.prompts.tokenizer.added_tokens import PICTURE_MARK, strip_guards
from singletree.prompts.tokenizer.tokenizer import Tokenizer
from singletree.server.capsules import Span
from singletree.server.ids import NewId, TurnCallIds, new_id
from singletree.server.models.chat_format import ChatFormat
from singletree.server.turn.decoder import DecodedTurn
from singletree.server.turn.round_trip import RenderedTurnParser, survives_round_trip

_JOINT_TOKENS = 16
"""How many tokens before the end of a turn are compared with it."""


class TurnRecorder:
    """Records one generation, for the turn memory and for capsules. It does not change the generation.

    Args:
        opening: how the prompt opened the turn.
        history: the turns before it.
        places: keys of the turns of ``history``, under which the memory finds them.
        enders: tokens that end a turn, or that the template prints behind one.
        tools: the tools of the conversation.
        names_reasoning: whether the client gets its reasoning under ids, by which the turn is recognised later.
        behind: the remembered turns of the conversation, in order.
        begun: the beginning of the turn, where the client sent it; it is not in ``history``.

    Attributes:
        turn: what was generated of the turn, when it is over.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        opening: GenerationPrompt,
        history: Sequence[Turn],
        places: HistoryDigests,
        ids: TurnCallIds,
        enders: Collection[int],
        decoded: DecodedTurn,
        *,
        tools: Sequence[Tool] = (),
        names_reasoning: bool = False,
        behind: Sequence[GeneratedTurn] = (),
        begun: BegunTurn | None = None,
    ) -> None:
        self._chat_format = chat_format
        self._tools = tools
        self._begun = begun
        self._behind = behind
        self._opening = opening
        self._history = history
        self._places = places
        self._ids = ids
        self._enders = enders
        self._decoded = decoded
        self._answer = new_id("") if names_reasoning else ""
        # A capsule holds what was generated, and the beginning of a turn that the client began was not.
        self._capsules = chat_format.capsules if begun is None else None
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

    def seal_end(self) -> str:
        """Return the capsule of the tokens behind the last capsule, for a turn that is over and has a whole call.

        It is empty for other turns, since clients take the last part of an answer without calls for the answer, and
        for tokens that come back without it.
        """
        if self._capsules is None or not self._is_over or self.turn is None:
            return ""
        token_ids = self._decoded.token_ids
        rest = token_ids[self._sealed : self.tokens]
        if not rest or not any(call.complete for call in self.turn.tool_calls):
            return ""
        sealed = token_ids[max(0, self._sealed - _JOINT_TOKENS) : self._sealed]
        before = self._chat_format.tokenizer.decode(sealed) if sealed else self._opening.tail
        if survives_round_trip(self._chat_format, self.turn, rest, before, self._tools):
            return ""
        return self._seal_up_to(self.tokens, is_last=True)

    def seal_rest(self) -> str:
        """Return the capsule of the tokens behind the last capsule, for a turn that is over; empty without any."""
        if self._capsules is None or not self._is_over or self._sealed >= self.tokens:
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
        """End the turn and remember it. Of a turn that a stop string cut, what was kept is remembered, not sealed."""
        decoded = self._decoded
        if not decoded.length:
            return
        if reason == "stop_sequence":
            kept = "".join(event.raw for event in decoded.events)
            token_ids = decoded.token_ids[: decoded.length]
            self._remember(fold(decoded.events), tokens_of_text(self._chat_format.tokenizer, token_ids, kept))
            return
        while decoded.length and decoded.token_ids[decoded.length - 1] in self._enders:
            decoded.length -= 1
        if decoded.is_reasoning:
            decoded.end_reasoning()
        self._is_over = True
        self.turn = fold(decoded.events)
        self._remember(self.turn, decoded.token_ids[: decoded.length])

    def _remember(self, turn: Turn, token_ids: array[int] | None) -> None:
        if not turn.parts or not token_ids:
            return
        named = _with_reasoning_ids(turn, self._answer) if self._answer else turn
        if self._begun is not None:
            named = Turn("assistant", (*self._begun.parts, *named.parts))
            token_ids = self._begun.token_ids + token_ids
            if not self._is_printed(named, token_ids):
                return
        known = GeneratedTurn(
            named,
            self._opening,
            token_ids,
            self._places[len(self._history)],
            has_unique_ids=self._ids.minted.issuperset(call.id for call in named.tool_calls),
        )
        if self._chat_format.memory is not None:
            self._chat_format.memory.remember(known, behind=self._behind)

    def _is_printed(self, turn: Turn, token_ids: array[int]) -> bool:
        """Return whether ``token_ids`` give ``turn``: the template may have left out a part of its beginning."""
        parse = RenderedTurnParser(self._chat_format.family, self._tools)
        printed = parse(self._chat_format.tokenizer.decode(token_ids), self._opening.tail)
        return comparable_parts(printed) == comparable_parts(turn)


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
    prompt: Prompt,
    places: HistoryDigests,
    ids: TurnCallIds,
    decoded: DecodedTurn,
    *,
    tools: Sequence[Tool] = (),
    is_continued: bool = False,
    names_reasoning: bool = False,
    stop_token_ids: Collection[int] = (),
) -> TurnRecorder | None:
    """Return a recorder for the turn that ``prompt`` opens.

    Return None if the turns of this template cannot be separated later, and if the turn has a beginning by the client
    that is not found in the prompt.

    Args:
        places: the keys of its turns in the turn memory.
        is_continued: whether the turn at the end of the prompt is continued.
        names_reasoning: whether the client gets reasoning under ids.
        stop_token_ids: tokens that end this turn in addition to the model's own.
    """
    layout, history = chat_format.layout, prompt.turns
    if chat_format.memory is None or layout is None or not history:
        return None
    text, begun, opening = prompt.text, None, None
    if history[-1].role == "assistant":
        begun = begun_turn(prompt, layout, chat_format.tokenizer) if is_continued else None
        if begun is None:
            return None
        history, text, opening = history[:-1], begun.text, begun.opening
    if opening is None:
        opening = _opening(text, history[-1] if history else _NO_TURN, layout)
    if opening is None:
        return None
    printed_time = 0.0 if prompt.clock is None else prompt.clock.at
    if printed_time != opening.clock:
        opening = replace(opening, clock=printed_time)
    enders = chat_format.derived(_enders)
    if stop_token_ids:
        enders = enders.union(stop_token_ids)
    return TurnRecorder(
        chat_format,
        opening,
        history,
        places,
        ids,
        enders,
        decoded,
        tools=tools,
        names_reasoning=names_reasoning,
        behind=prompt.remembered,
        begun=begun,
    )


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


_NO_TURN = Turn("user")
_LONGEST_TEXT, _LONGEST_ASKED = 64, 256
_NAME_BYTES = 8


_LONGEST_CUT = 512
"""The longest text behind the kept one for which the last token of that is looked for, in characters."""


def tokens_of_text(tokenizer: Tokenizer, token_ids: array[int], text: str) -> array[int] | None:
    """Return the tokens of ``text``, the beginning of what ``token_ids`` stand for; None if they cannot be determined.

    They are the first of ``token_ids``; where ``text`` ends inside a token, its part of that token is encoded anew.
    """
    count = len(token_ids)
    behind = len(tokenizer.decode(token_ids)) - len(text)
    if behind > _LONGEST_CUT:
        return None
    cut = ""
    while behind > len(cut) and count:
        count -= 1
        cut = tokenizer.decode(token_ids[count:])
    found = token_ids[:count]
    if len(cut) > behind:
        found += tokenizer.encode_array(tokenizer.guard(cut[: len(cut) - behind]))
    return found if found and tokenizer.decode(found) == text else None


@dataclass(frozen=True, slots=True)
class BegunTurn:
    """The beginning of a turn, as it is in the prompt.

    Attributes:
        token_ids: its tokens, from the end of the header on.
        text: the text before its tokens, as far as the header was looked for in it.
        opening: how the prompt opened it, where that is remembered; else None.
    """

    parts: tuple[Part, ...]
    token_ids: array[int]
    text: str
    opening: GenerationPrompt | None = None


def begun_turn(prompt: Prompt, layout: TurnDelimiters, tokenizer: Tokenizer) -> BegunTurn | None:
    """Return the turn of the assistant inside which ``prompt`` ends; None where its first token is not certain."""
    parts = tuple(generated_parts(prompt.given[-1])) if prompt.given else ()
    if not parts:
        return None
    if len(prompt.piece_ends) >= 2:
        start, end = prompt.piece_ends[-2:]
        behind = tokenizer.decode(prompt.token_ids[end:])
        if layout.last_header(behind)[0] < 0:
            known = prompt.remembered[-1]
            return BegunTurn(parts, prompt.token_ids[start:], prompt.text, known.opening)
    at, _ = layout.last_header(prompt.text)
    text = prompt.text[at:]
    if at < 0 or any(end in text for end in layout.ends):
        return None
    token_ids = tokenizer.encode_array(text)
    if not token_ids or prompt.token_ids[-len(token_ids) :] != token_ids:
        return None  # A token reaches over the end of the header.
    return BegunTurn(parts, token_ids, prompt.text[:at])
