"""Recalls turns from their capsules, on a server whose memory does not hold them (any more).

The tokens in the capsules of a turn reach to the end of its last reasoning, or of the turn. They are parsed with the
model's own family. The result replaces the parts that the harness sent for them; the rest of the turn follows as it
came. A turn whose content differs from its capsules was edited, and is rendered as edited.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from singletree.conversation import Conversation, Part, Reasoning, Text, Tool, ToolCall, Turn
from singletree.errors import InvalidRequest
from singletree.events import Event, fold
from singletree.parsing.parser import Parser
from singletree.prompts.replay.turn_comparison import end_of_spans, is_equivalent_turn, is_part_of
from singletree.prompts.replay.turn_memory import CAPSULE_KEY, GeneratedTurn
from singletree.server.capsules import Capsules, Span, Tampered
from singletree.server.models.chat_format import ChatFormat
from singletree.server.turn.round_trip import LAST_WORD

_CARRIERS = {
    "signature": ("messages", "thinking block"),
    "encrypted_content": ("input", "reasoning item"),
    "data": ("messages", "redacted_thinking block"),
    "reasoning_details": ("messages", "reasoning detail"),
}
"""The fields that carry a capsule -> the request parameter and the name of the object that holds them."""


@dataclass(frozen=True, slots=True)
class SealedTurns:
    """Opens the capsules that turns carry, for ``recall``."""

    chat_format: ChatFormat
    tools: Sequence[Tool]

    def tokens(self, turn: Turn) -> list[array[int]] | None:
        sealed = [capsule for _, capsule in _carried(turn)]
        return _tokens(self.chat_format.capsules, sealed) if sealed else None

    def open(self, turn: Turn) -> tuple[Turn, GeneratedTurn] | None:
        return open_capsules(self.chat_format, self.tools, turn)


def _tokens(capsules: Capsules | None, sealed: Sequence[str]) -> list[array[int]]:
    found = []
    for capsule in sealed:
        try:
            span = None if capsules is None else capsules.open(capsule)
        except Tampered:
            continue
        if span is not None:
            found.append(span.token_ids)
    return found


def open_capsules(
    chat_format: ChatFormat, tools: Sequence[Tool], turn: Turn
) -> tuple[Turn, GeneratedTurn] | None:
    """Return ``turn`` as it was generated, and its tokens; None if it was edited, or its capsules are incomplete."""
    capsules, memory = chat_format.capsules, chat_format.memory
    sealed = [capsule for _, capsule in _carried(turn)]
    if capsules is None or memory is None or not sealed:
        return None
    digest = hashlib.blake2b("\0".join(sealed).encode("utf-8", "replace"), digest_size=16)
    name = f"{CAPSULE_KEY}{digest.hexdigest()}"
    known = memory.get(name)
    if known is None:
        known = _parsed(chat_format, tools, _chain(capsules, sealed))
        if known is None:
            return None
        # The turn is added to the memory with the rest of its conversation (``TurnMemory.mark_used``).
        known.keys[:] = [name]
    generated = _as_generated(turn, known, tools)
    return None if generated is None else (generated, known)


def refuse_tampered(capsules: Capsules, conversation: Conversation) -> None:
    """Raise InvalidRequest if a capsule that this server, or one with its key, made was changed."""
    for turn in conversation.turns:
        for field, capsule in _carried(turn):
            try:
                capsules.open(capsule)
            except Tampered:
                param, place = _CARRIERS[field]
                raise InvalidRequest(
                    f"{param}: invalid {field} in a {place}: it was changed since this server sent it; "
                    f"send every {place} back unchanged, or leave it out",
                    param=param,
                ) from None


def _carried(turn: Turn) -> Iterator[tuple[str, str]]:
    """Yield the field and value of each capsule (or foreign signature) in the reasoning of ``turn``."""
    for part in turn.parts:
        if isinstance(part, Reasoning):
            for carried in part.capsules:
                yield carried.field, carried.value


def _chain(capsules: Capsules, sealed: Sequence[str]) -> list[Span]:
    """Return the spans of one turn from its beginning, up to the first that is missing or belongs to another turn."""
    spans: list[Span] = []
    for capsule in sealed:
        try:
            span = capsules.open(capsule)
        except Tampered:
            break
        if span is None or span.index != len(spans) or (spans and span.turn != spans[0].turn):
            break
        spans.append(span)
    return spans


def _parsed(chat_format: ChatFormat, tools: Sequence[Tool], spans: Sequence[Span]) -> GeneratedTurn | None:
    layout = chat_format.layout
    if layout is None or not spans:
        return None
    opening = spans[0].opening
    token_ids = array("I")
    for span in spans:
        token_ids.extend(span.token_ids)
    tokenizer = chat_format.tokenizer
    parser = Parser(chat_format.family, tools, opening.tail, special_tokens=tokenizer.special_tokens)
    stream = tokenizer.new_detokenizer()
    pieces = [*stream.feed(token_ids), *stream.flush()]
    events = [event for piece in pieces for event in parser.feed(*piece)]
    if spans[-1].is_last:
        return GeneratedTurn(fold([*events, *parser.close()]), opening, token_ids)
    turn = fold(events)
    whole = tuple(p for p in turn.parts if not isinstance(p, ToolCall) or p.complete)
    read = "".join(event.raw for event in events)
    held = "".join(text for text, _ in pieces)[len(read) :]
    last_words = _last_words(events) + held
    return (
        GeneratedTurn(replace(turn, parts=whole), opening, token_ids, ending=last_words)
        if last_words
        else None
    )


def _last_words(events: Sequence[Event]) -> str:
    blank = ""
    for event in reversed(events):
        if found := LAST_WORD.search(event.raw):
            return found[0] + blank
        blank = event.raw + blank
    return blank


def _as_generated(returned: Turn, known: GeneratedTurn, tools: Sequence[Tool]) -> Turn | None:
    """Return the parts in the capsules, followed by the rest of ``returned``; None if the two contradict each other."""
    beginning = known.turn
    calls = returned.tool_calls[: len(beginning.tool_calls)]
    end = end_of_spans(returned.text, [p.text for p in beginning.parts if isinstance(p, Text)])
    if not returned.text.strip():
        end = 0  # The client left out the text of a turn with calls.
    if end < 0 or len(calls) < len(beginning.tool_calls):
        return None
    ids = (call.id for call in calls)
    generated = tuple(replace(p, id=next(ids)) if isinstance(p, ToolCall) else p for p in beginning.parts)
    thoughts = (p for p in returned.parts if isinstance(p, Reasoning))
    came = Turn("assistant", (Text(returned.text[:end]), *thoughts, *calls))
    if not any(same(came, Turn("assistant", generated), tools) for same in (is_equivalent_turn, is_part_of)):
        return None
    rest = tuple(_behind(returned, end, len(calls)))
    if not known.ending:
        adds = any(not isinstance(p, Text) or p.text.strip() for p in rest)
        return None if adds else replace(returned, parts=generated)
    return replace(returned, parts=generated + rest)


def _behind(turn: Turn, characters: int, calls: int) -> Iterator[Part]:
    """Yield the parts behind the first ``characters`` of text and the first ``calls``, without reasoning."""
    for part in turn.parts:
        if isinstance(part, Text):
            text, characters = part.text[characters:], max(0, characters - len(part.text))
            if text:
                yield replace(part, text=text)
        elif isinstance(part, ToolCall) and calls:
            calls -= 1
        elif not isinstance(part, Reasoning):
            yield part
