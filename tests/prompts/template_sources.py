"""Chat templates to test with, and a second opinion on what rendering one gives."""

from __future__ import annotations

import json
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

from singletree import families
from singletree.conversation import Part, Reasoning, Text, ToolCall
from singletree.prompts.template.chat_template import ChatTemplate

COLLECTED = Path(__file__).resolve().parents[3] / "shared" / "templates"
"""Templates of many models, kept beside the repository because their licences are the models' own."""

TODAY = datetime(2026, 11, 21)

HERMES = """\
{%- if tools %}<|im_start|>system
{{ messages[0].content ~ '\\n' if messages[0].role == 'system' }}\
{%- for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls %}

<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
"""In Qwen 3's manner: everything has a place, arguments are printed as JSON."""

XML = """\
{%- for m in messages %}[{{ m.role }}]{{ m.content }}
{%- for call in m.tool_calls %}<function={{ call.function.name }}>
{%- for key, value in call.function.arguments | items %}<parameter={{ key }}>
{{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}
{%- endfor %}</function>{% endfor %}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
"""In Qwen 3 Coder's manner: takes the arguments apart."""

ALTERNATING = """\
{{ bos_token }}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate user/assistant') }}
{%- endif %}[{{ m.role }}]{{ m.content | trim }}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
"""In Gemma 2's manner: no system, no tools, turns taken in turn."""

PARTS = """\
{%- for m in messages %}[{{ m.role }}]
{%- for part in m.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
"""In a vision model's manner: content is a list of parts only."""

KIMI = """\
{%- set seen = namespace(ids=[]) %}
{%- for m in messages %}<|im_{{ m.role }}|>
{%- if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content }}
{%- for call in m.tool_calls %}{% set _ = seen.ids.append(call.id) %}\
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments }}<|tool_call_end|>
{%- endfor %}<|im_end|>
{%- endfor %}{% if add_generation_prompt %}<|im_assistant|>{% endif %}"""
"""In Kimi K2's manner: ids name the tool, and a list is changed in place."""


def load_template(source: str, **settings: Any) -> ChatTemplate:
    """The template ``source`` with what its family knows of it, as the server loads it; its clock stands still."""
    settings.setdefault("now", lambda: TODAY)
    is_kimi = "<|tool_call_argument_begin|>" in source
    family = families.get("kimi_k2") if is_kimi else families.find(source).family
    return ChatTemplate(
        source, variables=family.thinking_variables, call_id_format=family.call_id_format, **settings
    )


@cache
def cached_template(source: str) -> ChatTemplate:
    """The template ``source`` with two tokens, loaded once for all tests: it keeps nothing of what it renders."""
    return load_template(source, bos_token="<s>", eos_token="</s>")


def write_parts(parts: tuple[Part, ...]) -> str:
    """An assistant's parts in a format of the tests' own."""
    return "".join(
        f"<think>{part.text}</think>"
        if isinstance(part, Reasoning)
        else part.text
        if isinstance(part, Text)
        else f"<call {part.name} {part.arguments}/>"
        if isinstance(part, ToolCall)
        else ""
        for part in parts
    )


def collected() -> list[Path]:
    """The collected templates, each content once; empty where they are not at hand."""
    paths = sorted(COLLECTED.glob("*/*.jinja")) if COLLECTED.is_dir() else []
    return sorted({path.read_bytes(): path for path in reversed(paths)}.values())


def label(path: Path) -> str:
    """A template's name: folder and stem."""
    return f"{path.parent.name}/{path.stem}"


class _Generation(Extension):
    tags = {"generation"}  # noqa: RUF012 (the base class has it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Any) -> Any:
        return caller()


@cache
def _compiled(source: str) -> jinja2.Template:
    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    kind = SandboxedEnvironment if ".append(" in source else ImmutableSandboxedEnvironment
    environment = kind(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=fail, strftime_now=lambda format: TODAY.strftime(format))
    return environment.from_string(source)


def reference(source: str, messages: list[dict[str, Any]], **context: Any) -> str:
    """What Hugging Face's documentation says rendering gives, written without the code under test."""
    standard = {"tools": None, "documents": None, "add_generation_prompt": True, "bos_token": "<s>"}
    return _compiled(source).render(messages=messages, **(standard | {"eos_token": "</s>"} | context))
