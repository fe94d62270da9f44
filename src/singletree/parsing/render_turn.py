"""Renders a turn as the model would have written it, from the same declaration that parses it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from singletree.conversation import Part, Reasoning, Text, ToolCall
from singletree.parsing.arguments import nested_tags
from singletree.parsing.family import SLOT, Family, Form, Literals

_BARE_KEY = re.compile(r"[A-Za-z_][\w.-]*\Z")


def render_turn(family: Family, parts: Iterable[Part]) -> str:
    """Return ``parts`` of an assistant turn in the family's own format, in order.

    Parts that the format cannot write (images, calls in a family without calls) are left out. In a family whose turn is
    several messages, the header of the first message is left out: it belongs to the prompt.
    """
    rendered: list[str] = []
    before: type[Part] | None = None
    for kind, group in groupby(parts, key=type):
        if kind is ToolCall and family.forms:
            rendered.append(family.before_calls if before is Text else "")
            rendered.append(family.message_header if before else "")
            calls = [p for p in group if isinstance(p, ToolCall)]
            rendered.append(render_calls(family.forms[0], calls, message_header=family.message_header))
        elif kind is Text or (kind is Reasoning and family.reasoning):
            if before is ToolCall:
                rendered.append("\n" * family.forms[0].joiner.count("\n"))
            elif before is Text and family.reasoning and family.reasoning[0][:1].isalnum():
                rendered.append("\n")  # words open a thought only at the start of a line
            for i, part in enumerate(group):
                rendered.append(family.message_header if before or i else "")
                rendered.append(_render_prose(family, part))
        else:
            continue
        before = kind
    return "".join(rendered)


def _render_prose(family: Family, part: Part) -> str:
    if isinstance(part, Text):
        around = family.text or ("", "")
    elif isinstance(part, Reasoning) and family.reasoning:
        around = family.reasoning
    else:
        return ""
    return f"{around[0]}{part.text}{around[1]}"


def render_calls(
    form: Form, calls: Iterable[ToolCall], first_index: int = 0, message_header: str = ""
) -> str:
    """Return a run of calls in the notation of ``form``.

    Args:
        form: how the calls are written.
        calls: the calls, in order.
        first_index: number of the first call, for formats that count them (Kimi).
        message_header: header of each message, in families whose turn is several messages.
    """
    joiner = form.between(message_header)
    written = [render_call(form, call, first_index + i) for i, call in enumerate(calls)]
    return joiner.join(written) if form.wrap_each else f"{form.calls[0]}{joiner.join(written)}{form.calls[1]}"


def render_call(form: Form, call: ToolCall, index: int) -> str:
    """Return one call in the notation of ``form``. Where the format carries JSON, the arguments keep their bytes.

    ``index`` is the number of the call, counted from 0.
    """
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
        values["literals"] = render_literals(form.literals, call.arguments or "{}")
    opener, closer = form.calls if form.wrap_each else ("", "")
    return SLOT.sub(lambda m: values[m[1]], f"{opener}{form.call}{closer}")


def _wire_id(form: Form, call: ToolCall, index: int) -> str:
    if form.id_picture:
        own = re.escape(form.id_picture.replace("{name}", call.name)).replace(r"\{index\}", r"\d+")
        if "{name}" in form.id_picture and re.fullmatch(own, call.id):
            return call.id  # counted over the conversation, which is not known here
        return form.id_picture.replace("{name}", call.name).replace("{index}", str(index))
    return call.id


def _escaped(form: Form, text: str) -> str:
    for character, escape in reversed(form.escapes):
        text = text.replace(character, escape)
    return text


def _parameters(form: Form, arguments: str) -> Iterable[str]:
    for key, value in _members(arguments).items():
        slots = {"key": _escaped(form, key), "value": _text_of(value), "type": _type(value)}
        slots["string"] = "true" if slots["type"] == "string" else "false"
        if form.nested:
            slots["value"] = nested_tags.render_nested(form.parameter, value, _text_of)
        yield SLOT.sub(lambda m, slots=slots: slots[m[1]], form.parameter)  # type: ignore[misc]


class _Number(str):
    """A number with the digits in which it was written."""


def _members(arguments: str) -> Mapping[str, Any]:
    members: Mapping[str, Any] = json.loads(arguments, parse_float=_Number, parse_int=_Number)
    return members


_TYPES = ((_Number, "number"), (str, "string"), (bool, "boolean"), (dict, "object"), (list, "array"))


def _type(value: Any) -> str:
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "null")


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    """Return JSON text in which numbers keep their digits."""
    if isinstance(value, _Number):
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


def render_literals(dialect: Literals, arguments: str) -> str:
    """Return the members of the JSON object ``arguments`` as ``key=value`` in ``dialect``."""
    written = (
        f"{key}{dialect.assign}{_literal(dialect, value)}" for key, value in _members(arguments).items()
    )
    return dialect.separator.join(written)


def _literal(dialect: Literals, value: Any) -> str:
    if isinstance(value, _Number):
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
