"""Turns that come back in their capsules, to a server that does not know them or not any more.

The tokens in the capsules of a turn go up to the end of its last reasoning, or of the turn itself. They are read with
the model's own parser; what they say takes the place of what the harness made of it, and the rest of the turn stands
behind it as it came. A turn that says something else than its capsules was edited: it is rendered as edited.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace

from singletree.conversation import Conversation, Part, Reasoning, Text, Tool, ToolCall, Turn
from singletree.errors import InvalidRequest
from singletree.events import Event, fold
from singletree.parsing.parser import Parser
from singletree.prompts.replay import Remembered, end_of, says_the_same
from singletree.server.capsule import Capsules, Span, Tampered
from singletree.server.catalog import Speech

_CARRIERS = {
    "signature": ("messages", "thinking block"),
    "encrypted_content": ("input", "reasoning item"),
}
"""The fields that carry a capsule, and where their protocols have them."""

_LAST_WORD = re.compile(r"\S+\s*\Z")


def opened(speech: Speech, tools: Sequence[Tool], turn: Turn) -> tuple[Turn, Remembered] | None:
    """``turn`` as it was said and what is known of its tokens; None if its capsules do not tell, or it was edited."""
    capsules, memory = speech.capsules, speech.memory
    sealed = [capsule for _, capsule in _carried(turn)]
    if capsules is None or memory is None or not sealed:
        return None
    digest = hashlib.blake2b("\0".join(sealed).encode("utf-8", "replace"), digest_size=16)
    name = f"capsule {digest.hexdigest()}"
    known = memory.named(name)
    if known is None:
        known = _read(speech, tools, _chain(capsules, sealed))
        if known is None:
            return None
        memory.remember(known, name)
    said = _as_said(turn, known, tools)
    return None if said is None else (said, known)


def refuse_tampered(capsules: Capsules, conversation: Conversation) -> None:
    """Raises InvalidRequest for a capsule of ours that was changed."""
    for turn in conversation.turns:
        for field, capsule in _carried(turn):
            try:
                capsules.open(capsule)
            except Tampered:
                param, place = _CARRIERS[field]
                raise InvalidRequest(
                    f"{param}: invalid {field} in a {place}: it is not as this server gave it; "
                    f"send every {place} back unchanged, or leave it out",
                    param=param,
                ) from None


def _carried(turn: Turn) -> Iterator[tuple[str, str]]:
    """What the reasoning of ``turn`` brings along, and in which field."""
    for part in turn.parts:
        if isinstance(part, Reasoning) and part.extra:
            for field in _CARRIERS:
                capsule = part.extra.get(field)
                if capsule and isinstance(capsule, str):
                    yield field, capsule


def _chain(capsules: Capsules, sealed: Sequence[str]) -> list[Span]:
    """The spans of one turn from its beginning, as far as none is missing."""
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


def _read(speech: Speech, tools: Sequence[Tool], spans: Sequence[Span]) -> Remembered | None:
    layout = speech.layout
    if layout is None or not spans:
        return None
    opening = spans[0].opening
    token_ids = array("I")
    for span in spans:
        token_ids.extend(span.token_ids)
    tokenizer = speech.tokenizer
    parser = Parser(speech.family, tools, opening.tail, special_tokens=tokenizer.special_tokens)
    stream = tokenizer.stream()
    pieces = [*stream.feed(token_ids), *stream.flush()]
    events = [event for piece in pieces for event in parser.feed(*piece)]
    if spans[-1].is_last:
        return Remembered(fold([*events, *parser.close()]), opening, token_ids)
    turn = fold(events)
    whole = tuple(p for p in turn.parts if not isinstance(p, ToolCall) or p.complete)
    read = "".join(event.raw for event in events)
    held = "".join(text for text, _ in pieces)[len(read) :]
    last_words = _last_words(events) + held
    return (
        Remembered(replace(turn, parts=whole), opening, token_ids, last_words=last_words)
        if last_words
        else None
    )


def _last_words(events: Sequence[Event]) -> str:
    """What ``events`` end in, from the last word on."""
    blank = ""
    for event in reversed(events):
        if found := _LAST_WORD.search(event.raw):
            return found[0] + blank
        blank = event.raw + blank
    return blank


def _as_said(returned: Turn, known: Remembered, tools: Sequence[Tool]) -> Turn | None:
    """The turn as the capsules say it, and behind that what came back beside it; None when they contradict."""
    beginning = known.turn
    calls = returned.tool_calls[: len(beginning.tool_calls)]
    end = end_of(returned.text, [p.text for p in beginning.parts if isinstance(p, Text)])
    if end < 0 or len(calls) < len(beginning.tool_calls):
        return None
    ids = (call.id for call in calls)
    said = tuple(replace(p, id=next(ids)) if isinstance(p, ToolCall) else p for p in beginning.parts)
    thoughts = (p for p in returned.parts if isinstance(p, Reasoning))
    came = Turn("assistant", (Text(returned.text[:end]), *thoughts, *calls))
    if not says_the_same(came, Turn("assistant", said), tools):
        return None
    rest = tuple(_behind(returned, end, len(calls)))
    if not known.last_words:
        adds = any(not isinstance(p, Text) or p.text.strip() for p in rest)
        return None if adds else replace(returned, parts=said)
    return replace(returned, parts=said + rest)


def _behind(turn: Turn, characters: int, calls: int) -> Iterator[Part]:
    """The parts of ``turn`` without so many characters of its text, so many of its calls, and its reasoning."""
    for part in turn.parts:
        if isinstance(part, Text):
            text, characters = part.text[characters:], max(0, characters - len(part.text))
            if text:
                yield replace(part, text=text)
        elif isinstance(part, ToolCall) and calls:
            calls -= 1
        elif not isinstance(part, Reasoning):
            yield part
