"""A turn as the model would have written it, from the same declaration that reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from singletree.conversation import Part, Reasoning, Text, ToolCall
from singletree.parsing import elements
from singletree.parsing.family import SLOT, Family, Form, Literals

_BARE_KEY = re.compile(r"[A-Za-z_][\w.-]*\Z")


def draw(family: Family, parts: Iterable[Part]) -> str:
    """``parts`` of an assistant turn in the family's own format, in order.

    Parts that the format cannot say (images, calls in a family without calls) are left out. Where a turn is several
    messages, what the first begins with is the prompt's.
    """
    drawn: list[str] = []
    before: type[Part] | None = None
    for kind, group in groupby(parts, key=type):
        if kind is ToolCall and family.forms:
            drawn.append(family.before_calls if before is Text else "")
            drawn.append(family.turn if before else "")
            calls = [p for p in group if isinstance(p, ToolCall)]
            drawn.append(draw_calls(family.forms[0], calls, turn=family.turn))
        elif kind is Text or (kind is Reasoning and family.reasoning):
            if before is ToolCall:
                drawn.append("\n" * family.forms[0].joiner.count("\n"))
            elif before is Text and family.reasoning and family.reasoning[0][:1].isalnum():
                drawn.append("\n")  # words open a thought only at the start of a line
            for i, part in enumerate(group):
                drawn.append(family.turn if before or i else "")
                drawn.append(_draw_prose(family, part))
        else:
            continue
        before = kind
    return "".join(drawn)


def _draw_prose(family: Family, part: Part) -> str:
    if isinstance(part, Text):
        around = family.text or ("", "")
    elif isinstance(part, Reasoning) and family.reasoning:
        around = family.reasoning
    else:
        return ""
    return f"{around[0]}{part.text}{around[1]}"


def draw_calls(form: Form, calls: Iterable[ToolCall], first_index: int = 0, turn: str = "") -> str:
    """A run of calls. ``first_index`` numbers them in formats that count (Kimi)."""
    joiner = form.between(turn)
    written = [draw_call(form, call, first_index + i) for i, call in enumerate(calls)]
    return joiner.join(written) if form.each else f"{form.calls[0]}{joiner.join(written)}{form.calls[1]}"


def draw_call(form: Form, call: ToolCall, index: int) -> str:
    """One call; its arguments keep the bytes they have where the format carries JSON."""
    values = {
        "name": _escaped(form, call.name),
        "id": _wire_id(form, call, index),
        "args": call.arguments or "{}",
    }
    values |= {"index": str(index + 1), "any": ""}
    if form.is_json:
        values["name"] = json.dumps(call.name, ensure_ascii=False)[1:-1]
    if form.parameter:
        values["params"] = "".join(_parameters(form, call.arguments or "{}"))
    if form.literals:
        values["literals"] = draw_literals(form.literals, call.arguments or "{}")
    opener, closer = form.calls if form.each else ("", "")
    return SLOT.sub(lambda m: values[m[1]], f"{opener}{form.call}{closer}")


def _wire_id(form: Form, call: ToolCall, index: int) -> str:
    if form.id_picture:
        return form.id_picture.replace("{name}", call.name).replace("{index}", str(index))
    return call.id


def _escaped(form: Form, text: str) -> str:
    for character, spelling in reversed(form.escapes):
        text = text.replace(character, spelling)
    return text


def _parameters(form: Form, arguments: str) -> Iterable[str]:
    for key, value in _members(arguments).items():
        slots = {"key": _escaped(form, key), "value": _spell(value), "type": _type(value)}
        slots["string"] = "true" if slots["type"] == "string" else "false"
        if form.nested:
            slots["value"] = elements.draw(form.parameter, value, _spell)
        yield SLOT.sub(lambda m, slots=slots: slots[m[1]], form.parameter)  # type: ignore[misc]


class _Spelled(str):
    """A number in the digits it was written in."""


def _members(arguments: str) -> Mapping[str, Any]:
    members: Mapping[str, Any] = json.loads(arguments, parse_float=_Spelled, parse_int=_Spelled)
    return members


_TYPES = ((_Spelled, "number"), (str, "string"), (bool, "boolean"), (dict, "object"), (list, "array"))


def _type(value: Any) -> str:
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "null")


def _spell(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    """JSON text in which numbers keep their digits."""
    if isinstance(value, _Spelled):
        return str(value)
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{json.dumps(k, ensure_ascii=False)}: {_json(v)}" for k, v in value.items())
            + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(_json, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def draw_literals(dialect: Literals, arguments: str) -> str:
    """The members of a JSON object as ``key=value`` in ``dialect``."""
    written = (
        f"{key}{dialect.assign}{_literal(dialect, value)}" for key, value in _members(arguments).items()
    )
    return dialect.separator.join(written)


def _literal(dialect: Literals, value: Any) -> str:
    if isinstance(value, _Spelled):
        return str(value)
    if isinstance(value, str):
        return (
            f"{dialect.quote}{value}{dialect.quote}"
            if dialect.verbatim
            else json.dumps(value, ensure_ascii=False)
        )
    if isinstance(value, list):
        return "[" + dialect.separator.join(_literal(dialect, v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + dialect.separator.join(_member(dialect, k, v) for k, v in value.items()) + "}"
    return dialect.words[2 if value is None else 0 if value else 1]


def _member(dialect: Literals, key: str, value: Any) -> str:
    if dialect.bare_keys:
        bare = key if _BARE_KEY.match(key) else _literal(dialect, key)
        return f"{bare}:{_literal(dialect, value)}"
    return f"{_literal(dialect, key)}: {_literal(dialect, value)}"
