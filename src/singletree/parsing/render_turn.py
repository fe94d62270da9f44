"""Renders a turn as the model would have written it, from the same declaration that parses it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from singletree.conversation import Part, Reasoning, Text, ToolCall
from singletree.parsing.family import ITEM, SLOT, Family, Form, Literals

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
            rendered.append(render_calls(family.forms[0], calls, family.message_header))
        elif kind is Text or (kind is Reasoning and family.reasoning):
            if before is ToolCall:
                rendered.append("\n" * family.forms[0].joiner.count("\n"))
            elif before is Text and family.reasoning and family.reasoning[0][:1].isalnum():
                rendered.append("\n")  # words open a thought only at the start of a line
            opener, closer = (family.text if kind is Text else family.reasoning) or ("", "")
            for i, part in enumerate(group):
                assert isinstance(part, Text | Reasoning)
                rendered.append(family.message_header if before or i else "")
                rendered.append(f"{opener}{part.text}{closer}")
        else:
            continue
        before = kind
    return "".join(rendered)


def render_calls(form: Form, calls: Iterable[ToolCall], message_header: str = "") -> str:
    """Return the calls of a turn in the notation of ``form``.

    ``message_header`` is the header of each message, in families whose turn is several messages.
    """
    joiner = form.between(message_header)
    written = [render_call(form, call, i) for i, call in enumerate(calls)]
    return joiner.join(written) if form.wrap_each else f"{form.calls[0]}{joiner.join(written)}{form.calls[1]}"


def render_call(form: Form, call: ToolCall, index: int) -> str:
    """Return one call in the notation of ``form``. Where the format carries JSON, the arguments keep their bytes.

    ``index`` is the number of the call, counted from 0.
    """
    arguments = call.arguments or "{}"
    name = json.dumps(call.name, ensure_ascii=False)[1:-1] if form.is_json else form.escaped(call.name)
    values = {
        "name": name,
        "id": _wire_id(form, call, index),
        "args": arguments,
        "index": str(index + 1),
        "any": "",
    }
    if form.parameter:
        values["params"] = "".join(_parameters(form, arguments))
    if form.literals:
        values["literals"] = render_literals(form.literals, arguments)
    opener, closer = form.calls if form.wrap_each else ("", "")
    return SLOT.sub(lambda m: values[m[1]], f"{opener}{form.call}{closer}")


def _wire_id(form: Form, call: ToolCall, index: int) -> str:
    if form.id_format:
        own = re.escape(form.id_format.replace("{name}", call.name)).replace(r"\{index\}", r"\d+")
        if "{name}" in form.id_format and re.fullmatch(own, call.id):
            return call.id  # counted over the conversation, which is not known here
        return form.id_format.replace("{name}", call.name).replace("{index}", str(index))
    return call.id


def _parameters(form: Form, arguments: str) -> Iterable[str]:
    for key, value in _members(arguments).items():
        type_ = next((name for kind, name in _TYPES if isinstance(value, kind)), "null")
        slots = {"key": form.escaped(key), "value": _text_of(value), "type": type_}
        slots["string"] = "true" if type_ == "string" else "false"
        if form.nested:
            slots["value"] = _nested(form.parameter, value)
        yield SLOT.sub(lambda m, slots=slots: slots[m[1]], form.parameter)  # type: ignore[misc]


def _nested(pattern: str, value: Any) -> str:
    """Return the content of an element; scalars, and empty objects and arrays, are text."""
    if not value or not isinstance(value, dict | list):
        return _text_of(value)
    elements = []
    for key, inner in value.items() if isinstance(value, dict) else ((ITEM, each) for each in value):
        head, _, tail = (part.replace("{key}", key) for part in pattern.partition("{value}"))
        elements.append(head + _nested(pattern, inner) + tail)
    return "".join(elements)


class _Number(str):
    """A number with the digits in which it was written."""


def _members(arguments: str) -> Mapping[str, Any]:
    """Return the members of a JSON object. Arguments that are none, such as cut ones, are one member as they are."""
    try:
        members = json.loads(arguments, parse_float=_Number, parse_int=_Number)
    except (ValueError, RecursionError):
        members = None
    return members if isinstance(members, dict) else {"arguments": arguments}


_TYPES = ((_Number, "number"), (str, "string"), (bool, "boolean"), (dict, "object"), (list, "array"))


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else _literal(_JSON, value)


_JSON = Literals(words=("true", "false", "null"))


def render_literals(dialect: Literals, arguments: str) -> str:
    """Return the members of the JSON object ``arguments`` as ``key=value`` in ``dialect``."""
    members = _members(arguments).items()
    return dialect.separator.join(
        f"{key}{dialect.assign}{_literal(dialect, value)}" for key, value in members
    )


def _literal(dialect: Literals, value: Any) -> str:
    if isinstance(value, _Number):
        return str(value)
    if isinstance(value, str) and dialect.verbatim:
        return f"{dialect.quote}{value}{dialect.quote}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
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
