"""Compares a turn that a client sends back with the turn that was generated.

A client may move, join, trim or leave out parts, and write arguments as other JSON text of the same value. A turn with
changed text was edited.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from singletree.conversation import Reasoning, Text, Tool, ToolCall, Turn
from singletree.prompts.replay.json_values import canonical_json
from singletree.prompts.replay.partial_turns import ProseSpan, consists_of
from singletree.prompts.replay.schema_defaults import schema_of, without_defaults

_NOT_ALPHANUMERIC = re.compile(r"[^0-9A-Za-z]+")
_SPACE = re.compile(r"\s+")
_ASCII_SPACE = bytes(code for code in range(128) if chr(code).isspace())


def generated_parts(turn: Turn) -> list[Text | Reasoning | ToolCall]:
    """Return the parts of ``turn`` that a model generates: text, reasoning and calls."""
    return [p for p in turn.parts if isinstance(p, Text | Reasoning | ToolCall)]


def normalized_id(text: str) -> str:
    """Return the id ``text`` without the characters that harnesses replace: only ASCII letters and digits are kept."""
    return _NOT_ALPHANUMERIC.sub("", text)


def without_space(text: str) -> str:
    """Return ``text`` without white space, since a client may trim and join texts."""
    if text.isascii():  # Most of a conversation is; its bytes are cleared five times as fast.
        return text.encode().translate(None, _ASCII_SPACE).decode()
    return "".join(text.split())


def is_equivalent_turn(returned: Turn, remembered: Turn, tools: Sequence[Tool] = ()) -> bool:
    """Return whether ``returned`` is ``remembered``, apart from the changes that harnesses are known to make.

    They move blocks, trim and join reasoning or leave it out, encode the arguments of calls again, and fill in the
    defaults of the schemas of ``tools``.

    Args:
        returned: a turn as the client sent it back.
        remembered: the turn as the model generated it.
    """
    spans = [p.text for p in remembered.parts if isinstance(p, Text)]
    reasoning = [p.text for p in remembered.parts if isinstance(p, Reasoning)]
    if not _is_made_of(returned.text, spans):
        return False
    if returned.reasoning.strip() and not _is_made_of(returned.reasoning, reasoning):
        return False
    calls = pair_calls(returned, remembered)
    return calls is not None and all(_is_same_call(theirs, ours, tools) for ours, theirs in calls)


def is_part_of(
    returned: Turn,
    remembered: Turn,
    tools: Sequence[Tool] = (),
    *,
    tags: Sequence[str] = (),
    allow_missing_reasoning: bool = True,
) -> bool:
    """Return whether ``returned`` consists of parts of ``remembered``, in their order, and of nothing else.

    Clients leave out reasoning, texts or calls, each as a whole, or send reasoning as text. A turn without calls must
    have all its text, since only the text identifies the turn.

    Args:
        returned: a turn as the client sent it back.
        remembered: the turn as the model generated it.
        tools: tools whose schemas' defaults the client may have filled in.
        tags: the markers of the model's reasoning; clients that keep reasoning in the content write them there.
        allow_missing_reasoning: whether some of the reasoning may be missing, or may come back as text. Otherwise the
            client returns all of it or none.
    """
    if bool(returned.tool_calls) != bool(remembered.tool_calls):
        return False
    if returned.tool_calls and not returned.text.strip():
        has_same_text = True
    else:
        spans = [
            ProseSpan(
                p.text, bool(remembered.tool_calls) or isinstance(p, Reasoning), isinstance(p, Reasoning)
            )
            for p in remembered.parts
            if isinstance(p, Text) or (allow_missing_reasoning and isinstance(p, Reasoning))
        ]
        # Chat Completions does not keep the order of reasoning and text.
        unordered = sorted(spans, key=lambda span: not span.is_reasoning)
        has_same_text = any(consists_of(returned.text, each, tags) for each in (spans, unordered))
    spans = [ProseSpan(p.text, allow_missing_reasoning) for p in remembered.parts if isinstance(p, Reasoning)]
    if not has_same_text or (returned.reasoning.strip() and not consists_of(returned.reasoning, spans)):
        return False
    calls = pair_calls(returned, remembered, in_part=True)
    return calls is not None and all(_is_same_call(theirs, ours, tools) for ours, theirs in calls)


def pair_calls(
    returned: Turn, remembered: Turn, *, in_part: bool = False
) -> list[tuple[ToolCall, ToolCall]] | None:
    """Pair each generated call with the call that came back: by id, or by position where all ids differ.

    Args:
        in_part: whether calls may be missing in ``returned``; they are left out of the result.

    Returns:
        Pairs of (generated call, returned call); None where the calls cannot be paired.
    """
    theirs = {normalized_id(c.id): c for c in returned.tool_calls}
    ours = {normalized_id(c.id): c for c in remembered.tool_calls}
    has_unique_ids = len(theirs) == len(returned.tool_calls) and len(ours) == len(remembered.tool_calls)
    if has_unique_ids and (ours.keys() == theirs.keys() or (in_part and theirs.keys() < ours.keys())):
        pairs = ((call, theirs.get(normalized_id(call.id))) for call in remembered.tool_calls)
        return [(call, same) for call, same in pairs if same is not None]
    if len(returned.tool_calls) != len(remembered.tool_calls):
        return None
    if has_unique_ids and ours.keys() & theirs.keys():
        return None
    return list(zip(remembered.tool_calls, returned.tool_calls, strict=True))


def _is_same_call(returned: ToolCall, generated: ToolCall, tools: Sequence[Tool]) -> bool:
    if returned.name != generated.name:
        return False
    ours, theirs = canonical_json(generated.arguments), canonical_json(returned.arguments)
    schema = None if ours == theirs else schema_of(generated.name, tools)
    if schema is None:
        return ours == theirs
    # Arguments that are not JSON are equal only as text, and that was compared above.
    return canonical_json(theirs, lambda value: without_defaults(value, _decode(ours), schema)) == ours


def _decode(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return None


def _is_made_of(text: str, spans: Sequence[str]) -> bool:
    end = end_of_spans(text, spans)
    return end >= 0 and _skip_space(text, end) == len(text)


def end_of_spans(text: str, spans: Sequence[str]) -> int:
    """Return the position in ``text`` at which ``spans`` end, if it begins with them; otherwise -1.

    White space at the edges of the spans is ignored.
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
