"""Compares a turn that a client sends back with the turn that was generated.

A client may move, join, trim, repeat or leave out parts, and write arguments as other JSON text of the same value. A
turn with changed text was edited. JSON texts are compared by value: a client may have read and written them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from singletree.conversation import Part, Reasoning, Text, Tool, ToolCall, Turn

_SPACE = re.compile(r"\s+")

REASONING_TAGS = tuple(
    f"<{end}{name}>" for name in ("think", "thinking", "thought", "reasoning") for end in ("", "/")
)
"""Tags that clients write around reasoning that they keep in the content, whatever the model's own markers are."""

_MAX_POSITIONS = 64
"""How many ways to match a text are followed at once. Only a text that repeats one span many times has more."""


class ProseSpan(NamedTuple):
    """A text or reasoning of a turn, whether a client may leave it out, and whether it is reasoning."""

    text: str
    is_optional: bool
    is_reasoning: bool = False


def consists_of(text: str, spans: Sequence[ProseSpan], tags: Sequence[str] = ()) -> bool:
    """Return whether ``text`` is made of ``spans`` in order, each complete, with any white space between them.

    ``tags`` are markers of reasoning that ``text`` may contain, besides the usual ones.
    """
    if _is_sequence_of(text, spans):
        return True
    found = [tag for tag in (*REASONING_TAGS, *tags) if tag in text]
    bare = [span._replace(text=_without(span.text, found)) for span in spans]
    return bool(found) and _is_sequence_of(_without(text, found), bare)


def _is_sequence_of(text: str, spans: Sequence[ProseSpan]) -> bool:
    positions = [_skip_space(text, 0)]
    for span in spans:
        wanted = span.text.strip()
        if not wanted:
            continue
        matched = [_skip_space(text, at + len(wanted)) for at in positions if text.startswith(wanted, at)]
        skipped = positions if span.is_optional else ()
        positions = sorted({*matched, *skipped}, reverse=True)[:_MAX_POSITIONS]
        if not positions:
            return False
    return positions[0] == len(text)


def _without(text: str, tags: Sequence[str]) -> str:
    for tag in tags:
        text = text.replace(tag, "")
    return text


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def without_echoes(turn: Turn) -> Turn:
    """Return ``turn`` without the texts that repeat the reasoning before them (Copilot CLI on Responses sends such).

    A turn without any other text or call keeps them: there the model itself may have repeated its reasoning.
    """
    kept: list[Part] = []
    reasoning = ""
    for part in turn.parts:
        if not (isinstance(part, Text) and reasoning and part.text.strip() == reasoning):
            kept.append(part)
        reasoning = part.text.strip() if isinstance(part, Reasoning) else ""
    if len(kept) == len(turn.parts):
        return turn
    has_more = any(isinstance(p, ToolCall) or (isinstance(p, Text) and p.text.strip()) for p in kept)
    return replace(turn, parts=tuple(kept)) if has_more else turn


PartT = TypeVar("PartT", bound=Part)

_NOT_ALPHANUMERIC = re.compile(r"[^0-9A-Za-z]+")
_ASCII_SPACE = bytes(code for code in range(128) if chr(code).isspace())
_RARE_SPACE = re.compile(b"|".join(chr(n).encode() for n in range(128, 0xD800) if chr(n).isspace()))


def generated_parts(turn: Turn) -> list[Text | Reasoning | ToolCall]:
    """Return the parts of ``turn`` that a model generates: text, reasoning and calls."""
    return [p for p in turn.parts if isinstance(p, Text | Reasoning | ToolCall)]


def written_text(part: Text | Reasoning | ToolCall) -> str:
    """Return the text of a part that the model generated; of a call, its arguments."""
    return part.arguments if isinstance(part, ToolCall) else part.text


def without_reasoning(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Return ``parts`` without those of type ``Reasoning``."""
    return tuple(part for part in parts if not isinstance(part, Reasoning))


def with_joined_texts(parts: Sequence[PartT], *, by_lines: bool = False) -> Sequence[PartT | Text]:
    """Return ``parts`` with neighbouring texts joined: a turn that was continued has two where one is printed.

    With ``by_lines``, a line break comes between two where there is none.
    """
    if (Text, Text) not in pairwise(map(type, parts)):
        return parts
    joined: list[PartT | Text] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Text) and isinstance(last, Text):
            is_cut = not by_lines or last.text.endswith("\n") or part.text.startswith("\n")
            joined[-1] = Text(last.text + ("" if is_cut else "\n") + part.text)
        else:
            joined.append(part)
    return joined


def normalized_id(text: str) -> str:
    """Return the id ``text`` without the characters that harnesses replace: only ASCII letters and digits are kept."""
    return _NOT_ALPHANUMERIC.sub("", text)


def without_space(text: str) -> str:
    """Return ``text`` without white space, since a client may trim and join texts."""
    return packed_text(text).decode("utf-8", "surrogatepass")


def packed_text(text: str) -> bytes:
    """Return ``without_space`` as UTF-8. From bytes, the white space of ASCII is taken five times as fast."""
    packed = text.encode("utf-8", "surrogatepass").translate(None, _ASCII_SPACE)
    return packed if packed.isascii() else _RARE_SPACE.sub(b"", packed)


def is_equivalent_turn(returned: Turn, remembered: Turn, tools: Sequence[Tool] = ()) -> bool:
    """Return whether ``returned`` is ``remembered``, apart from the changes that harnesses are known to make.

    They move blocks, trim and join reasoning or leave it out, encode the arguments of calls again, and fill in the
    defaults of the schemas of ``tools``.
    """
    texts, thoughts = (
        [p.text for p in remembered.parts if isinstance(p, kind)] for kind in (Text, Reasoning)
    )
    if not _is_made_of(returned.text, texts):
        return False
    if returned.reasoning.strip() and not _is_made_of(returned.reasoning, thoughts):
        return False
    calls = pair_calls(returned, remembered, tools)
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
        has_calls, parts = bool(remembered.tool_calls), generated_parts(remembered)
        spans = [
            ProseSpan(p.text, has_calls or isinstance(p, Reasoning), isinstance(p, Reasoning))
            # Only beside a call can a text be missing, and then as a whole.
            for p in (with_joined_texts(parts) if has_calls else parts)
            if isinstance(p, Text) or (allow_missing_reasoning and isinstance(p, Reasoning))
        ]
        # Chat Completions does not keep the order of reasoning and text.
        unordered = sorted(spans, key=lambda span: not span.is_reasoning)
        has_same_text = any(consists_of(returned.text, each, tags) for each in (spans, unordered))
    spans = [ProseSpan(p.text, allow_missing_reasoning) for p in remembered.parts if isinstance(p, Reasoning)]
    if not has_same_text or (returned.reasoning.strip() and not consists_of(returned.reasoning, spans)):
        return False
    calls = pair_calls(returned, remembered, tools, in_part=True)
    return calls is not None and all(_is_same_call(theirs, ours, tools) for ours, theirs in calls)


def pair_calls(
    returned: Turn, remembered: Turn, tools: Sequence[Tool] = (), *, in_part: bool = False
) -> list[tuple[ToolCall, ToolCall]] | None:
    """Pair each generated call with the call that came back: by id or, where all ids differ, by position.

    Where ``in_part`` is set, calls may be missing in ``returned``, and are left out of the result; if all ids differ,
    the others are found by names and arguments. None where the calls cannot be paired, or in several ways.
    """
    theirs = {normalized_id(c.id): c for c in returned.tool_calls}
    ours = {normalized_id(c.id): c for c in remembered.tool_calls}
    has_unique_ids = len(theirs) == len(returned.tool_calls) and len(ours) == len(remembered.tool_calls)
    if has_unique_ids and (ours.keys() == theirs.keys() or (in_part and theirs.keys() < ours.keys())):
        pairs = ((call, theirs.get(normalized_id(call.id))) for call in remembered.tool_calls)
        return [(call, same) for call, same in pairs if same is not None]
    if has_unique_ids and ours.keys() & theirs.keys():
        return None
    if len(returned.tool_calls) == len(remembered.tool_calls):
        return list(zip(remembered.tool_calls, returned.tool_calls, strict=True))
    return _pair_by_content(returned.tool_calls, remembered.tool_calls, tools) if in_part else None


def _pair_by_content(
    returned: Sequence[ToolCall], generated: Sequence[ToolCall], tools: Sequence[Tool]
) -> list[tuple[ToolCall, ToolCall]] | None:
    """Pair calls with the same name and arguments, in their order; None if that is possible in no way or in several."""
    first = _first_places(returned, generated, tools)
    last = _first_places(returned[::-1], generated[::-1], tools)
    if first is None or last is None or first != [len(generated) - 1 - place for place in reversed(last)]:
        return None
    return [(generated[place], call) for place, call in zip(first, returned, strict=True)]


def _first_places(
    returned: Sequence[ToolCall], generated: Sequence[ToolCall], tools: Sequence[Tool]
) -> list[int] | None:
    """Return the first place in ``generated`` behind the one before, for each of ``returned``; None if one has none."""
    rest = iter(enumerate(generated))
    places = [next((at for at, ours in rest if _is_same_call(call, ours, tools)), -1) for call in returned]
    return None if -1 in places else places


def _is_same_call(returned: ToolCall, generated: ToolCall, tools: Sequence[Tool]) -> bool:
    if returned.name != generated.name:
        return False
    if not generated.complete and _is_beginning(returned.arguments, generated.arguments):
        return True
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
    """Return where in ``text`` ``spans`` end, if it begins with them, else -1. White space around them is ignored."""
    at = 0
    for span in map(str.strip, spans):
        at = _skip_space(text, at)
        if not text.startswith(span, at):
            return -1
        at += len(span)
    return at


_LONE_SURROGATE = re.compile("[\ud800-\udfff]")

_PROTOTYPE = "__proto__"
"""JavaScript libraries drop this key, because assigning it changes the object's prototype."""


def canonical_json(arguments: str, change: Callable[[Any], Any] = lambda value: value, **form: Any) -> str:
    """Return the canonical form of a JSON text (empty: ``{}``); a text that is not JSON is returned unchanged.

    Two texts have the same canonical form if JavaScript's ``JSON.parse`` and ``JSON.stringify`` can turn one into the
    other (``after_javascript``). White space, escapes and the order of keys make no difference. ``change`` is applied
    to the value before it is encoded again, with sorted keys or in ``form``.
    """
    try:
        value = after_javascript(json.loads(arguments or "{}", parse_int=float))
        return json.dumps(change(value), **form or {"sort_keys": True})
    except (ValueError, RecursionError):
        return arguments


_JSON_LEAF = re.compile(r'\s+|"(?:[^"\\]|\\.)*"?|[^\s"{}\[\]:,]+')


def _is_beginning(returned: str, cut: str) -> bool:
    """Return whether ``returned`` has the first values of the JSON text ``cut``: clients parse as much as they can."""
    compact = partial(canonical_json, separators=(",", ":"))
    begun = _JSON_LEAF.sub(lambda leaf: compact(leaf[0]) if leaf[0].strip() else "", cut)
    kept = compact(returned).rstrip("]}")
    return begun.startswith(kept) and (kept[-1:] in "{[" or begun[len(kept) :][:1] in ("", ",", "]", "}"))


def after_javascript(value: Any) -> Any:
    """Return a JSON value as a client written in JavaScript sends it back. Raises RecursionError if it is too deep.

    Numbers become doubles: large integers are rounded, ``1.0`` is ``1``, ``-0.0`` is ``0``, and a number that a double
    cannot hold (``1e400``, ``NaN``) is null. Lone surrogates become U+FFFD when a string is encoded. The key
    ``__proto__`` disappears.
    """
    if isinstance(value, str):
        return _LONE_SURROGATE.sub("\ufffd", value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return _double(value)
    if isinstance(value, dict):
        return {after_javascript(k): after_javascript(v) for k, v in value.items() if k != _PROTOTYPE}
    return [after_javascript(item) for item in value]


def _double(number: int | float) -> float | None:
    try:
        double = float(number)
    except OverflowError:
        return None
    return (double or 0.0) if math.isfinite(double) else None  # -0.0 is false


def without_defaults(returned: Any, generated: Any, schema: Any) -> Any:
    """Return ``returned`` without the properties that ``generated`` lacks and that equal a default of ``schema``.

    Claude Code sends each call back with the defaults of its tool filled in.
    """
    if not isinstance(schema, Mapping):
        return returned
    if isinstance(returned, dict) and isinstance(generated, dict):
        properties = schema.get("properties")
        schemas = properties if isinstance(properties, Mapping) else {}
        return {
            key: without_defaults(value, generated.get(key), schemas.get(key))
            for key, value in returned.items()
            if key in generated or not _is_default(value, schemas.get(key))
        }
    if isinstance(returned, list) and isinstance(generated, list) and len(returned) == len(generated):
        items = schema.get("items")
        return [without_defaults(*pair, items) for pair in zip(returned, generated, strict=True)]
    return returned


def lacks_defaults(generated: Any, schema: Any) -> bool:
    """Return whether ``schema`` has a default for a property that ``generated`` leaves out, at any depth."""
    if not isinstance(schema, Mapping):
        return False
    if isinstance(generated, list):
        return any(lacks_defaults(item, schema.get("items")) for item in generated)
    properties = schema.get("properties")
    if not isinstance(generated, dict) or not isinstance(properties, Mapping):
        return False
    return any(
        lacks_defaults(generated[key], inner)
        if key in generated
        else isinstance(inner, Mapping) and "default" in inner
        for key, inner in properties.items()
    )


def _is_default(value: Any, schema: Any) -> bool:
    if not isinstance(schema, Mapping) or "default" not in schema:
        return False
    # Compared as text, because in Python ``False == 0``.
    one, other = (json.dumps(after_javascript(v), sort_keys=True) for v in (value, schema["default"]))
    return one == other


def schema_of(name: str, tools: Sequence[Tool]) -> Mapping[str, Any] | None:
    """Return the schema of the tool called ``name``; None where no such tool exists."""
    return next((tool.parameters for tool in tools if tool.name == name), None)
