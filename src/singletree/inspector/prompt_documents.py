"""The prompts of the inspector as JSON values: who made which tokens, what was in place, and where it broke.

A template writes what it likes around a message, so the place of a message in the tokens is found by its own words:
the first and the last line of each text, and the names of calls. The border between two messages is behind the token
that ends a turn.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import accumulate, chain, pairwise
from operator import itemgetter
from typing import Any

from singletree.conversation import Part, Text, ToolCall, ToolResult, Turn
from singletree.inspector.prompt_history import PromptMessage, ReplayedRange
from singletree.inspector.turn_documents import InspectedJson, TokenizerOf, decode_tokens, summarize_turn
from singletree.inspector.turn_record import InspectedSession, InspectedTurn
from singletree.pictures import FIRST_PICTURE_NUMBER
from singletree.prefixes import common_prefix
from singletree.prompts.history.canonicalization import RULES, SESSION_CLOCK
from singletree.prompts.tokenizer.tokenizer import Tokenizer

_LINE = 200
_WINDOW = 1 << 16
"""How far behind the last message the next words may be, in bytes, besides twice the length of the message."""
_MANY_LINES = 4000
_PICTURE = "[picture]"
Range = tuple[int, int]


class PromptText:
    """The text of a prompt, as UTF-8 (``data``), with the place of each token. Numbers of pictures among ``ids`` have
    no text.
    """

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int]) -> None:
        pieces = [b"" if id >= FIRST_PICTURE_NUMBER else tokenizer.token_bytes(id) for id in ids]
        self.data = b"".join(pieces)
        self._ids = ids
        self._starts = list(accumulate(map(len, pieces), initial=0))
        self._stops = tokenizer.stop_token_ids
        self._special = frozenset(tokenizer.added_tokens.values())

    def between(self, start: int, end: int) -> str:
        return self.data[self._starts[start] : self._starts[end]].decode("utf-8", "replace")

    def border(self, end: int, start: int) -> int:
        """Return the index of the first token of a message whose words begin at the byte ``start``; those of the
        message before end at ``end``.
        """
        first, last = bisect_left(self._starts, end), max(0, bisect_right(self._starts, start) - 1)
        gap = range(first, last)
        stop = next((at for at in reversed(gap) if self._ids[at] in self._stops), None)
        if stop is None:
            stop = next((at for at in gap if self._ids[at] in self._special), None)
        if stop is None:
            return last
        at = stop + 1
        while at < last and self.between(at, at + 1).isspace():
            at += 1
        return at


def message_ranges(
    text: PromptText, messages: Sequence[PromptMessage], count: int
) -> list[tuple[int, int] | None]:
    """Return (first token, end) of each message; None for one whose words are not found. ``count``: all tokens."""
    found: list[tuple[int, int, int]] = []
    at = 0
    for index, message in enumerate(messages):
        parts = () if message.turn is None else message.turn.parts
        words = list(chain.from_iterable(map(_words, parts)))
        window = at + _WINDOW + 2 * sum(part.chars for part in message.parts) * 4
        start = -1
        for word in words:
            place = text.data.find(word, at, window)
            if place < 0:
                continue
            start = place if start < 0 else start
            at = place + len(word)
        if start >= 0:
            found.append((index, start, at))
    ranges: list[tuple[int, int] | None] = [None] * len(messages)
    borders = [0]
    for (_, _, end), (_, start, _) in pairwise(found):
        borders.append(text.border(end, start))
    borders.append(count)
    for number, (index, _, _) in enumerate(found):
        ranges[index] = (borders[number], max(borders[number], borders[number + 1]))
    return ranges


def _words(part: Part) -> Iterator[bytes]:
    """Yield what a prompt has of a part of a message, in its order."""
    if isinstance(part, Text):
        lines = part.text.strip().splitlines()
        if lines:
            yield _utf8(lines[0].strip()[:_LINE])
        if len(lines) > 1:
            yield _utf8(lines[-1].strip()[-_LINE:])
    elif isinstance(part, ToolCall):
        yield _utf8(part.name)
    elif isinstance(part, ToolResult):
        for inner in part.parts:
            yield from _words(inner)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def encode_prompt(
    session: InspectedSession, turn: InspectedTurn, tokenizer_of: TokenizerOf, *, with_texts: bool
) -> InspectedJson:
    """Return all that is known of the prompt of a turn."""
    step, details = turn.step, turn.details
    count, summary = step.prompt_tokens, summarize_turn(turn, with_texts=with_texts)
    tokens = session.prompts.tokens(turn.id) if with_texts else None
    tokenizer = None if tokens is None else tokenizer_of(step.model)
    ids = array("I", tokens or b"")
    text = None if tokenizer is None else PromptText(tokenizer, ids)
    messages = session.prompts.messages(turn.id)
    ranges = [None] * len(messages) if text is None else message_ranges(text, messages, count)
    rerendered = _rerendered(turn, ids, tokenizer)
    replayed = session.prompts.replayed(turn.id)
    spans = None
    if turn.id in session.prompts:
        spans = list(_spans(turn, ids, replayed, rerendered, messages, ranges, text))
    return {
        "turn": turn.id,
        "session": session.id,
        "compared_with": turn.before,
        "count": count,
        "matched": step.matched,
        "exact": text is not None,
        "spans": spans,
        "messages": [
            _encode_message(turn, index, message, ranges[index], with_texts=with_texts)
            for index, message in enumerate(messages)
        ],
        "tools": None if details is None else [_encode_tool(turn, tool) for tool in details.tools],
        "break": summary["break"],
        "first_difference": _first_difference(turn, ids, tokenizer),
        "rules": [{"name": name, "reason": _REASONS.get(name, "")} for name in turn.rules],
        "settings": {} if details is None else dict(details.settings),
        "request": _encode_request(session, turn, with_texts=with_texts),
        "verdict": summary["verdict"],
        "worker": summary["worker"],
    }


_REASONS = {rule.name: rule.reason for rule in RULES} | {SESSION_CLOCK.name: SESSION_CLOCK.reason}


def encode_prompt_tokens(
    session: InspectedSession, turn: InspectedTurn, tokenizer: Tokenizer, start: int, end: int
) -> InspectedJson | None:
    """Return the tokens of the prompt from ``start`` up to ``end``; None where they are not kept."""
    tokens = session.prompts.tokens(turn.id)
    if tokens is None:
        return None
    ids = array("I", tokens)
    part = ids[start:end].tolist()
    texts, special = decode_tokens(tokenizer, [0 if id >= FIRST_PICTURE_NUMBER else id for id in part])
    for at, id in enumerate(part):
        if id >= FIRST_PICTURE_NUMBER:
            texts[at], special[at] = _PICTURE, 1
    shown = [None if id >= FIRST_PICTURE_NUMBER else id for id in part]
    return {
        "start": start,
        "end": start + len(part),
        "count": len(ids),
        "id": shown,
        "text": texts,
        "special": special,
    }


def _rerendered(turn: InspectedTurn, ids: array[int], tokenizer: Tokenizer | None) -> list[Range]:
    """Return the ranges of tokens that the last prompt had too, and that have to be read again because of a break."""
    step, lost = turn.step, turn.lost
    if step.broken is None:
        return []
    if tokenizer is None or lost is None or lost.tokens is None:
        end = min(step.prompt_tokens, step.matched + step.lost)
        return [(step.matched, end)]
    was, now = (_lines(part, tokenizer) for part in (array("I", lost.tokens), ids[step.matched :]))
    is_long = len(was) + len(now) > _MANY_LINES
    starts = list(accumulate(map(len, now), initial=step.matched))
    found: list[Range] = []
    for code, a1, a2, b1, b2 in SequenceMatcher(None, was, now, autojunk=is_long).get_opcodes():
        end = starts[b2]
        if code == "replace":
            # A line that goes on otherwise, such as the last one of a turn, which ends with another token.
            old, new = ([*chain.from_iterable(lines)] for lines in (was[a1:a2], now[b1:b2]))
            end = starts[b1] + common_prefix(old, new)
        if code in ("equal", "replace") and end > starts[b1]:
            found.append((starts[b1], end))
    return found


def _lines(ids: array[int], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Split tokens into lines: a token with a line break is the last of its line."""
    lines: list[tuple[int, ...]] = []
    start = 0
    breaks: dict[int, bool] = {}
    for at, id in enumerate(ids):
        ends = breaks.get(id)
        if ends is None:
            ends = breaks[id] = id < FIRST_PICTURE_NUMBER and b"\n" in tokenizer.token_bytes(id)
        if ends:
            lines.append(tuple(ids[start : at + 1]))
            start = at + 1
    if start < len(ids):
        lines.append(tuple(ids[start:]))
    return lines


def _spans(
    turn: InspectedTurn,
    ids: array[int],
    replayed: Sequence[ReplayedRange],
    rerendered: Sequence[Range],
    messages: Sequence[PromptMessage],
    ranges: Sequence[Range | None],
    text: PromptText | None,
) -> Iterable[InspectedJson]:
    step, count = turn.step, turn.step.prompt_tokens
    pictures = [(at, at + 1) for at, id in enumerate(ids) if id >= FIRST_PICTURE_NUMBER]
    placed = [(index, each) for index, each in enumerate(ranges) if each is not None]
    every = [*replayed, *rerendered, *pictures, *(each for _, each in placed), (0, step.matched), (0, count)]
    cuts = sorted({min(count, max(0, edge)) for each in every for edge in each})
    owners = [(start, end, index) for index, (start, end) in placed]
    for start, end in pairwise(cuts):
        owner = _inside(owners, start)
        rules = () if owner is None else messages[owner[2]].rules
        kept = "rerendered" if _inside(rerendered, start) else "new"
        made = "model" if _inside(replayed, start) else "template"
        is_picture = _inside(pictures, start) is not None
        words = None if text is None else _PICTURE if is_picture else text.between(start, end)
        yield {
            "start": start,
            "end": end,
            "kind": "kept" if start < step.matched else kept,
            "from": "picture" if is_picture else made,
            "message": None if owner is None else owner[2],
            "rule": rules[0] if rules else None,
            "text": words,
        }


def _inside(ranges: Sequence[Any], at: int) -> Any:
    """Return the one of ``ranges``, which are in order, that contains ``at``; None for none."""
    number = bisect_right(ranges, at, key=itemgetter(0)) - 1
    return ranges[number] if number >= 0 and ranges[number][0] <= at < ranges[number][1] else None


def _encode_message(
    turn: InspectedTurn, index: int, message: PromptMessage, place: Range | None, *, with_texts: bool
) -> InspectedJson:
    state = "same"
    if index >= turn.same_messages:
        earlier = () if turn.lost is None else turn.lost.messages
        is_there = index < turn.same_messages + len(earlier)
        state = "same" if message.fingerprint in earlier else "changed" if is_there else "new"
    is_missing = place is None and with_texts and message.turn is not None
    return {
        "index": index,
        "role": message.fingerprint.role,
        "start": None if place is None else place[0],
        "end": None if place is None else place[1],
        "state": state,
        "rules": list(message.rules),
        "chars": sum(part.chars for part in message.parts),
        "parts": [{"kind": part.kind, "name": part.name, "chars": part.chars} for part in message.parts],
        "text": message_text(message.turn) if is_missing else None,
    }


def message_text(turn: Turn | None) -> str | None:
    """Return all that a message says, for people to read; None for a message that is not kept."""
    return None if turn is None else "\n".join(filter(None, map(_part_text, turn.parts)))


def _part_text(part: Any) -> str:
    if isinstance(part, ToolCall):
        return f"{part.name} {part.arguments}"
    if isinstance(part, ToolResult):
        return "\n".join(filter(None, map(_part_text, part.parts)))
    return str(getattr(part, "text", None) or f"[{type(part).__name__.lower()}]")


def _encode_tool(turn: InspectedTurn, tool: Any) -> InspectedJson:
    state, lost = "same", turn.lost
    if lost is not None:
        state = "added" if tool.name in lost.added else "changed" if tool.name in lost.changed else "same"
    return {"name": tool.name, "bytes": tool.size, "digest": tool.digest, "state": state}


def _first_difference(
    turn: InspectedTurn, ids: array[int], tokenizer: Tokenizer | None
) -> InspectedJson | None:
    if turn.step.broken is None:
        return None
    at, lost = turn.step.matched, turn.lost
    was = array("I", lost.tokens or b"")[:1] if lost is not None else ()
    return {"token": at, "was": _token(was, tokenizer), "now": _token(ids[at : at + 1], tokenizer)}


def _token(ids: Sequence[int], tokenizer: Tokenizer | None) -> InspectedJson | None:
    if tokenizer is None or not ids:
        return None
    if ids[0] >= FIRST_PICTURE_NUMBER:
        return {"id": None, "text": _PICTURE}
    return {"id": ids[0], "text": tokenizer.token_bytes(ids[0]).decode("utf-8", "replace")}


def _encode_request(
    session: InspectedSession, turn: InspectedTurn, *, with_texts: bool
) -> InspectedJson | None:
    if turn.details is None:
        return None
    body = session.prompts.body(turn.id) if with_texts else None
    return {
        "bytes": turn.details.body_bytes,
        "kept": body is not None,
        "body": None if body is None else body.decode("utf-8", "replace"),
    }
