"""The difference of two prompts as a JSON value: by message, by tool, by setting."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import islice
from typing import Any

from singletree.inspector.prompt_documents import message_text
from singletree.inspector.prompt_history import PromptMessage
from singletree.inspector.turn_documents import InspectedJson, summarize_turn
from singletree.inspector.turn_record import InspectedSession, InspectedTool, InspectedTurn
from singletree.prefixes import common_text_prefix
from singletree.protocols.wire import dump
from singletree.server.sessions.divergence import WIDTH

_MOST_CHANGES = 200
_LONGEST_VALUE = 500
_DEEPEST = 40


@dataclass(frozen=True, slots=True)
class ComparedSide:
    """One of two prompts that are compared; it may come from another process.

    ``turn`` is the turn's summary; ``tokens`` are packed, None where they are not kept.
    """

    turn: InspectedJson
    session: str
    tokens: bytes | None
    messages: tuple[PromptMessage, ...]
    tools: tuple[InspectedTool, ...]
    settings: dict[str, str]
    rules: tuple[str, ...]


def side_of(session: InspectedSession, turn: InspectedTurn, *, with_texts: bool) -> ComparedSide:
    """Return what a comparison needs of the prompt of ``turn``."""
    details = turn.details
    return ComparedSide(
        summarize_turn(turn, with_texts=with_texts),
        session.id,
        session.prompts.tokens(turn.id),
        session.prompts.messages(turn.id),
        () if details is None else details.tools,
        {} if details is None else dict(details.settings),
        turn.rules,
    )


def encode_difference(a: ComparedSide, b: ComparedSide, *, with_texts: bool) -> InspectedJson:
    """Return what differs between two prompts, without the summaries of their sessions."""
    same = None
    if a.tokens is not None and b.tokens is not None:
        same = common_text_prefix(a.tokens, b.tokens) // WIDTH
    names = dict.fromkeys((*a.settings, *b.settings))
    return {
        "same_tokens": same,
        "exact": same is not None,
        "messages": list(_messages(a.messages, b.messages, with_texts=with_texts)),
        "tools": list(_tools(a.tools, b.tools, with_texts=with_texts)),
        "settings": [
            {"name": name, "a": a.settings.get(name), "b": b.settings.get(name)}
            for name in names
            if a.settings.get(name) != b.settings.get(name)
        ],
        "rules": {"a": list(a.rules), "b": list(b.rules)},
    }


def _messages(
    a: Sequence[PromptMessage], b: Sequence[PromptMessage], *, with_texts: bool
) -> Iterator[InspectedJson]:
    prints = [each.fingerprint for each in a], [each.fingerprint for each in b]
    codes = SequenceMatcher(None, *prints, autojunk=False).get_opcodes()
    pairs: list[tuple[str, int | None, int | None]] = []
    for code, a1, a2, b1, b2 in codes:
        if code == "equal":
            pairs += [("same", at, b1 + at - a1) for at in range(a1, a2)]
            continue
        both = min(a2 - a1, b2 - b1)
        for at in range(both):
            if prints[0][a1 + at].role == prints[1][b1 + at].role:
                pairs.append(("changed", a1 + at, b1 + at))
            else:
                pairs += [("removed", a1 + at, None), ("added", None, b1 + at)]
        pairs += [("removed", at, None) for at in range(a1 + both, a2)]
        pairs += [("added", None, at) for at in range(b1 + both, b2)]
    gone = {prints[0][at]: at for kind, at, _ in pairs if kind == "removed" and at is not None}
    moved = {
        gone[prints[1][at]]: at
        for kind, _, at in pairs
        if kind == "added" and at is not None and prints[1][at] in gone
    }
    arrived = set(moved.values())
    for kind, left, right in pairs:
        if kind == "removed" and left in moved:
            continue
        if kind == "added" and right in arrived:
            kind, left = "moved", next(one for one, other in moved.items() if other == right)
        yield _pair(kind, left, right, a, b, with_texts=with_texts)


def _pair(
    kind: str,
    left: int | None,
    right: int | None,
    a: Sequence[PromptMessage],
    b: Sequence[PromptMessage],
    *,
    with_texts: bool,
) -> InspectedJson:
    one, other = None if left is None else a[left], None if right is None else b[right]
    known = one or other
    shows = with_texts and kind != "same"
    return {
        "state": kind,
        "a": left,
        "b": right,
        "role": None if known is None else known.fingerprint.role,
        "a_chars": _chars(one),
        "b_chars": _chars(other),
        "a_text": message_text(one.turn) if shows and one is not None else None,
        "b_text": message_text(other.turn) if shows and other is not None else None,
    }


def _chars(message: PromptMessage | None) -> int | None:
    return None if message is None else sum(part.chars for part in message.parts)


def _tools(
    a: Sequence[InspectedTool], b: Sequence[InspectedTool], *, with_texts: bool
) -> Iterator[InspectedJson]:
    old = {tool.name: tool for tool in a}
    new = {tool.name: tool for tool in b}
    orders = [name for name in old if name in new], [name for name in new if name in old]
    for name, tool in new.items():
        if name not in old:
            yield _tool(name, "added", None, tool, with_texts=with_texts)
        elif old[name].digest != tool.digest:
            yield _tool(name, "changed", old[name], tool, with_texts=with_texts)
        else:
            place = orders[1].index(name)
            state = "same" if orders[0][place] == name else "reordered"
            yield _tool(name, state, None, None, with_texts=with_texts)
    for name, tool in old.items():
        if name not in new:
            yield _tool(name, "removed", tool, None, with_texts=with_texts)


def _tool(
    name: str, state: str, a: InspectedTool | None, b: InspectedTool | None, *, with_texts: bool
) -> InspectedJson:
    one, other = (
        tool.encoded.decode() if with_texts and tool is not None and tool.encoded is not None else None
        for tool in (a, b)
    )
    changes = None
    if one is not None and other is not None:
        found = islice(_differences(json.loads(one), json.loads(other), "", 0), _MOST_CHANGES)
        changes = [{"path": path, "a": _value(was), "b": _value(now)} for path, was, now in found]
    return {"name": name, "state": state, "a": one, "b": other, "changes": changes}


_ABSENT = object()


def _value(value: Any) -> str | None:
    return None if value is _ABSENT else dump(value).decode()[:_LONGEST_VALUE]


def _differences(a: Any, b: Any, path: str, depth: int) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, value in a, value in b) of each part of two JSON values that differs."""
    if depth < _DEEPEST and isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys((*a, *b)):
            below = f"{path}.{key}" if path else str(key)
            yield from _differences(a.get(key, _ABSENT), b.get(key, _ABSENT), below, depth + 1)
    elif depth < _DEEPEST and isinstance(a, list) and isinstance(b, list):
        for at in range(max(len(a), len(b))):
            one, other = (each[at] if at < len(each) else _ABSENT for each in (a, b))
            yield from _differences(one, other, f"{path}[{at}]", depth + 1)
    elif a is _ABSENT or b is _ABSENT or a != b:
        yield path, a, b
