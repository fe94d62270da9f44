"""Write a small chat template of our own for each family: ``python tests/families/make_templates.py [NAME ...]``.

Each is written from the grammar in the family's declaration and the role markers below. The committed files are the
test's input: they stay as they are when a declaration changes, so a marker cannot change unnoticed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from singletree import families
from singletree.parsing.family import SLOT, Family, Form, Literals, with_variant

FOLDER = Path(__file__).parent / "templates"

ROLES: dict[str, tuple[str, str]] = {
    "beam": ("<|start|>assistant", "<|return|>"),
    "command_r": ("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    "exaone4": ("[|assistant|]", "[|endofturn|]\n"),
    "ernie45": ("<|im_start|>assistant\n", "\n<response>\n"),
    "firefunction": ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    "gigachat3": ("assistant<|role_sep|>\n", "<|message_sep|>\n\n"),
    "granite": ("<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>\n"),
    "granite4": ("<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>\n"),
    "hunyuan_a13b": ("<|extra_0|>", "<|eos|>"),
    "ling3": ("<role>ASSISTANT</role>", "<|role_end|>"),
    "llama3_json": ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    "llama4_pythonic": ("<|header_start|>assistant<|header_end|>\n\n", "<|eot|>"),
    "minimax_m1": ("<beginning_of_sentence>ai name=assistant\n", "<end_of_sentence>\n"),
    "nemotron_nano": ("<SPECIAL_11>Assistant\n", "<SPECIAL_12>\n"),
    "poolside_v1": ("<assistant>\n", "</assistant>\n"),
    "reka": ("assistant: ", "<sep>"),
    "spark25": ("<|Bot|>", "<end>"),
}
"""What an assistant message begins and ends with, where that tells one family from another; else ChatML."""

HINTS = {
    "functionary_v3_2": "Write >>>all before words.",
    "granite": "Begin calls with <|tool_call|>.",
    "functionary_v3_1": "Call a function as <{start_tag}={function_name}>{parameters}{end_tag}.",
    "llama3_json": 'Answer with {"name": the function, "parameters": dictionary of argument name and its value}.',
    "pythonic": "Answer with [func_name1(params_name1=params_value1, params_name2=params_value2)].",
    "xlam": 'Answer with [{"name": "tool_call_name", "arguments": {"key": "value"}}].',
    "qwen25_coder": "When a function can do what the user asks, answer with the call alone.",
    "step3p5": "An image is <im_patch>.",
    "nemotron_v3": "truncate_history_thinking",
}
"""What the system message says of calls, where a model is told of its format in words."""


_LINE_BREAK = "{{ '\\n' }}"


_TYPE_OF = (
    "{%- macro type_of(v) %}{{ 'string' if v is string else 'boolean' if v is boolean",
    "  else 'object' if v is mapping else 'number' if v is number else 'null' if v is none else 'array' }}",
    "{%- endmacro %}",
)


def template(family: Family) -> str:
    """Return a chat template in which assistant turns have the format of ``family``."""
    if family.variant:
        piece = ":own"
        source = template(replace(with_variant(family, f"HYTK = '{piece}'"), variant=None))
        return f"{{%- set HYTK = '{piece}' %}}\n{source.replace(piece, '{{ HYTK }}')}"
    in_parts = (
        (family.message_header, "") if family.message_header else ("<|im_start|>assistant\n", "<|im_end|>\n")
    )
    header, end = ROLES.get(family.name, in_parts)
    opened = family.reasoning[0] if family.starts_open and family.reasoning else ""
    lines = [
        *(_TYPE_OF if "{type}" in family.forms[0].parameter else ()),
        *_macros(family.forms[0].literals),
        "{%- if tools %}" + _text("<|im_start|>system\n"),
        _text(HINTS[family.name] + "\n") if family.name in HINTS else "",
        "{{ tools | tojson }}" + _text("<|im_end|>\n"),
        "{%- endif %}",
        "{%- for m in messages %}",
        "{%- if m.role == 'assistant' %}" + _text(header),
        "{%- set ns = namespace(begun=false) %}",
        *_prose(family, "m.reasoning_content", family.reasoning),
        *_prose(family, "m.content", family.text or ("", "")),
        *_calls(family),
        _text(end),
        "{%- else %}<|im_start|>{{ m.role }}" + _LINE_BREAK + "{{ m.content }}<|im_end|>" + _LINE_BREAK,
        "{%- endif %}",
        "{%- endfor %}",
        "{%- if add_generation_prompt %}" + _text(header + opened),
        "{%- endif %}",
    ]
    source = "\n".join(line for line in lines if line) + "\n"
    for mark in family.fingerprint:  # one of them has a line break as the template's own
        source = source.replace(mark.replace("\n", _LINE_BREAK), mark)
    return source


def _text(text: str) -> str:
    """Return Jinja source that prints ``text``; white space at its ends is protected from the tags beside it."""
    inner = text.strip()
    if not inner:
        return "{{ " + repr(text) + " }}" if text else ""
    before, _, after = text.partition(inner)
    shown = inner.removesuffix("{") + "{{ '{' }}" * inner.endswith("{")
    return _text(before) + shown.replace("\n", _LINE_BREAK) + _text(after)


def _prose(family: Family, field: str, around: tuple[str, str] | None) -> Iterable[str]:
    if around is None:
        return
    yield "{%- if " + field + " %}"
    if family.message_header:
        yield "{%- if ns.begun %}" + _text(family.message_header) + "{%- endif %}"
    yield _text(around[0]) + "{{ " + field + " }}" + _text(around[1])
    yield "{%- set ns.begun = true %}"
    yield "{%- endif %}"


def _calls(family: Family) -> Iterable[str]:
    if not family.forms:
        return
    form = family.forms[0]
    one = _pattern(form, form.call)
    yield "{%- if m.tool_calls %}"
    if family.message_header:
        yield "{%- if ns.begun %}" + _text(family.message_header) + "{%- endif %}"
    if family.before_calls:
        yield "{%- if m.content %}" + _text(family.before_calls) + "{%- endif %}"
    if not form.wrap_each:
        yield _text(form.calls[0])
    yield "{%- for c in m.tool_calls %}"
    yield "{%- set arguments = c.function.arguments %}"
    if joiner := form.between(family.message_header):
        yield "{%- if not loop.first %}" + _text(joiner) + "{%- endif %}"
    yield _text(form.calls[0]) + one + _text(form.calls[1]) if form.wrap_each else one
    yield "{%- endfor %}"
    if not form.wrap_each:
        yield _text(form.calls[1])
    yield "{%- endif %}"


def _pattern(form: Form, pattern: str) -> str:
    escaped = "".join(f" | replace({old!r}, {new!r})" for old, new in reversed(form.escapes))
    pairs = "{% for key, value in arguments | items %}"
    slots = {
        "name": "{{ c.function.name" + escaped + " }}",
        "id": _id(form),
        "index": "{{ loop.index }}",
        "any": "",
        "args": "{{ arguments if arguments is string else arguments | tojson }}",
        "key": "{{ key" + escaped + " }}",
        "value": "{{ value if value is string else value | tojson }}",
        "string": "{{ 'true' if value is string else 'false' }}",
        "type": "{{ type_of(value) }}",
    }
    if "{params}" in pattern:
        slots["params"] = pairs + _pattern(form, form.parameter) + "{% endfor %}"
    if form.literals:
        comma = "{% if not loop.first %}" + _text(form.literals.separator) + "{% endif %}"
        assign = _text(form.literals.assign)
        slots["literals"] = pairs + comma + "{{ key }}" + assign + "{{ literal(value) }}{% endfor %}"
    pieces = SLOT.split(pattern)
    return "".join(slots[piece] if at % 2 else _text(piece) for at, piece in enumerate(pieces))


def _id(form: Form) -> str:
    return "{{ loop.index0 }}" if form.id_format == "{index}" else "{{ c.id }}"


def _macros(literals: Literals | None) -> Iterable[str]:
    if literals is None:
        return
    true, false, null = literals.words
    key = "{{ k }}" if literals.bare_keys else "{{ k | tojson }}"
    assign = _text(literals.assign) if literals.bare_keys else _text(": ")
    comma = "{% if not loop.first %}" + _text(literals.separator) + "{% endif %}"
    string = (
        _text(literals.quote) + "{{ v }}" + _text(literals.quote) if literals.verbatim else "{{ v | tojson }}"
    )
    yield "{%- macro literal(v) %}"
    yield "{%- if v is string %}" + string
    yield "{%- elif v is boolean %}{{ '" + true + "' if v else '" + false + "' }}"
    yield "{%- elif v is none %}" + null
    pairs = "{% for k, w in v | items %}" + comma + key + assign + "{{ literal(w) }}{% endfor %}"
    yield "{%- elif v is mapping %}{{ '{' }}" + pairs + "{{ '}' }}"
    yield "{%- elif v is sequence %}[{% for w in v %}" + comma + "{{ literal(w) }}{% endfor %}]"
    yield "{%- else %}{{ v }}"
    yield "{%- endif %}"
    yield "{%- endmacro %}"


if __name__ == "__main__":
    for one in families.table():
        if one.forms and (one.name in sys.argv[1:] or not sys.argv[1:]):
            (FOLDER / f"{one.name}.jinja").write_text(template(one), encoding="utf-8")
